// The command line.
#pragma once

#include <string>
#include <vector>

#include "error.h"

namespace recapp {

struct Options {
  std::string artefact;
  std::string input = "-";
  std::string format = "auto";      // or json, arrow
  bool logits = false;              // outputs instead of scores
  bool check_rows = false;
  bool info = false;
  bool help = false;
  std::int64_t batch = 4096;        // as recapp scores many rows
  int threads = 0;                  // 0: as many as libtorch takes
  std::vector<std::int64_t> bench;  // batch sizes
  std::int64_t repeat = 200;        // batches that are timed of each size
  bool turns = false;               // time batches whenever standard input asks for some
};

Options read_options(int count, char** words);
std::string help(bool arrow);

}  // namespace recapp

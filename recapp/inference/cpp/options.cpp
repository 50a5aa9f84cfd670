#include "options.h"

#include <charconv>
#include <cstdint>

namespace recapp {
namespace {

std::int64_t positive(const std::string& option, std::string_view text, std::int64_t most) {
  std::int64_t made = 0;
  const char* end = text.data() + text.size();
  const auto found = std::from_chars(text.data(), end, made);
  if (found.ec != std::errc() || found.ptr != end || made < 1 || made > most) {
    throw Error(option + "=" + std::string(text.substr(0, 40)) + ": must be a whole number from 1 to " +
                std::to_string(most));
  }
  return made;
}

std::vector<std::int64_t> sizes(const std::string& option, std::string_view text) {
  std::vector<std::int64_t> made;
  while (true) {
    const std::size_t comma = text.find(',');
    made.push_back(positive(option, text.substr(0, comma), 1 << 20));
    if (comma == std::string_view::npos) return made;
    text.remove_prefix(comma + 1);
  }
}

// Take an option that has a value, and return whether it was one.
bool with_value(Options& made, const std::string& option, const std::string& value) {
  if (option == "--format") {
    if (value != "auto" && value != "json" && value != "arrow") {
      throw Error("--format=" + value + ": must be auto, json or arrow");
    }
    made.format = value;
  } else if (option == "--batch") {
    made.batch = positive(option, value, 1 << 20);
  } else if (option == "--threads") {
    made.threads = static_cast<int>(positive(option, value, 1024));
  } else if (option == "--bench") {
    made.bench = sizes(option, value);
  } else if (option == "--repeat") {
    made.repeat = positive(option, value, 10'000'000);
  } else {
    return false;
  }
  return true;
}

bool without_value(Options& made, const std::string& option) {
  if (option == "--logits") {
    made.logits = true;
  } else if (option == "--check-rows") {
    made.check_rows = true;
  } else if (option == "--info") {
    made.info = true;
  } else if (option == "--turns") {
    made.turns = true;
  } else if (option == "--help" || option == "-h") {
    made.help = true;
  } else {
    return false;
  }
  return true;
}

}  // namespace

Options read_options(int count, char** words) {
  Options made;
  std::vector<std::string> plain;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word.size() < 2 || word[0] != '-') {
      plain.push_back(word);
      continue;
    }
    if (without_value(made, word)) continue;
    const std::size_t equals = word.find('=');
    const std::string option = word.substr(0, equals);
    const bool apart = equals == std::string::npos;
    const std::string value = !apart ? word.substr(equals + 1) : i + 1 < count ? words[i + 1] : "";
    if (apart && i + 1 == count) {
      throw Error(word + ": no such option, or its value is missing; --help lists them");
    }
    if (!with_value(made, option, value)) {
      throw Error(option + ": no such option; --help lists them");
    }
    i += apart;
  }
  if (made.help) return made;
  if (plain.empty() || plain.size() > 2) {
    throw Error("give the directory of an artefact, and a file of rows or - ; --help says more");
  }
  made.artefact = plain[0];
  if (plain.size() == 2) made.input = plain[1];
  if (made.turns && made.input == "-") {
    throw Error("--turns reads standard input, so ROWS has to be a file");
  }
  return made;
}

std::string help(bool arrow) {
  return std::string(R"(recapp_score ARTEFACT [ROWS] [OPTION ...]

Prints the scores of each row, as JSON lines. ROWS is a file or - (standard input, the default):

  {"I1": 3, "C1": "05db9164", "C5": [1, 2, 3], ...}     JSON lines; null where there is no value
)") + (arrow ? "  Arrow IPC, a stream or a file; columns that are no features are left out\n"
             : "  (built without Arrow: it reads JSON lines only)\n") +
         R"(
The machine code that the artefact brings along is run: score only artefacts that you trust.

  --logits          print the model's outputs (logits) instead of scores
  --format=F        auto (default), json or arrow
  --batch=N         rows that are scored at once (4096)
  --threads=N       threads (those that libtorch takes)
  --check-rows      compare the checksums of all rows, which reads them
  --bench=1,64,...  time batches of these sizes, taken from ROWS in turn
  --repeat=N        batches of each size that are timed (200)
  --turns           time batches whenever standard input has a line "SIZE BATCHES COUNT": COUNT of
                    the first BATCHES ones, in turn; others can have their turns between
  --info            say what the artefact is, and read no rows
)";
}

}  // namespace recapp

// A loaded artefact: decoded rows become outputs.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>

#include "tables.h"

namespace recapp {

// Throw where this machine, its CPU or its libtorch cannot run the dense part; the error names what
// is lacking.
void check_machine(const Artefact& artefact);

class Scorer {
 public:
  // `check_rows`: whether the bytes of all rows are compared with their checksums.
  Scorer(const Artefact& artefact, bool check_rows);

  // Return the outputs of rows first .. first + count, each [count].
  std::vector<at::Tensor> outputs(const Rows& rows, std::int64_t first, std::int64_t count) const;

  // Return the scores of these outputs, each fp32.
  std::vector<at::Tensor> scores(const std::vector<at::Tensor>& outputs) const;

 private:
  // Where the vectors of a batch stand, as in recapp/engine/state.py.
  struct Places {
    std::vector<std::int64_t> first;   // element of each lookup
    std::vector<std::int64_t> stride;  // elements from one bag of a lookup to the next
    std::vector<at::Tensor> inputs;    // of the dense part
  };

  std::vector<FoundRows> find(const Rows& rows, std::int64_t first, std::int64_t count) const;
  Places place(const std::vector<FoundRows>& found, std::int64_t count) const;
  template <typename T>
  void sum(const std::vector<FoundRows>& found, const Places& places, std::int64_t count,
           T* flat) const;

  const Artefact& artefact_;
  MappedTables tables_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> dense_;
};

}  // namespace recapp

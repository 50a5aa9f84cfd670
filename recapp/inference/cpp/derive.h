// Columns that are computed from decoded ones, as in training (recapp/dataset/rows.py).
#pragma once

#include "decode.h"

namespace recapp {

// Values of which numbers and ids are made.
struct Raw {
  std::vector<float> numbers;       // [count, dense features], not transformed; NaN: missing
  std::vector<std::int64_t> times;  // [count, times], seconds; MISSING
  std::vector<float> vectors;       // [count, numbers of all vectors]
};

// Add the derived columns to decoded rows, and behind them the vectors.
void derive(const Artefact& artefact, const Raw& raw, Rows& rows);

}  // namespace recapp

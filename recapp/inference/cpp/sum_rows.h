// The arithmetic of lookups: sums of stored rows.
#pragma once

#include <cstdint>

#include "manifest.h"

namespace recapp {

// Sum rows into a vector of `dim` numbers. Each row is multiplied by `weight` and added in order,
// every operation rounded by itself: the bits are those of recapp/kernels/numba_vectors.py.
void sum_rows(Storage storage, std::int64_t dim, const std::uint8_t* const* rows,
              std::int64_t count, float weight, float* out);
void sum_rows(Storage storage, std::int64_t dim, const std::uint8_t* const* rows,
              std::int64_t count, double weight, double* out);

}  // namespace recapp

// Columns that are computed from decoded ones, as in training (recapp/dataset/derive.py).
#pragma once

#include "decode.h"

namespace recapp {

// Add the derived columns to decoded rows.
//   numbers   [count, dense features], not transformed; NaN where one is missing
void derive(const Artefact& artefact, const std::vector<float>& numbers, Rows& rows);

}  // namespace recapp

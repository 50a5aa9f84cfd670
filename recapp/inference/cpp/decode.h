// Values of the input become ids and numbers, as in training (recapp/dataset/decode.py).
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "manifest.h"

namespace recapp {

constexpr std::int64_t MISSING = std::numeric_limits<std::int64_t>::min();

// A value as it stands in the input.
struct Value {
  enum class Kind { null, integer, large, number, text, boolean };

  Kind kind = Kind::null;
  std::int64_t integer = 0;  // and of `boolean` 0 or 1
  std::uint64_t large = 0;   // of `large`: 2^63 and more
  double number = 0;
  std::string_view text;
  bool half = false;  // of an integer: it is kept in 32 bits with a sign
};

// Return an id, or MISSING. Throws BadValue.
std::int64_t id_of(const Value& value, TextIds way);
// Return the whole seconds of a time, rounded down, or MISSING. Throws BadValue.
//   ticks   of a second; if negative, the seconds of a tick
std::int64_t time_of(const Value& value, std::int64_t ticks);
// Return a number, 0 where it is missing. Throws BadValue.
float number_of(const Value& value);
// Whether a number is missing.
bool is_missing(const Value& value);
// Return a number as the dense part gets it.
float transformed(float value, Transform transform);

std::uint64_t xxh64(std::string_view text);

// The ids of a sparse feature.
struct Ids {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> ends;  // of each row
  bool lists = false;              // whether a row may have any number of them
};

// Decoded rows.
struct Rows {
  std::int64_t count = 0;
  std::vector<float> dense;  // [count, dense features], transformed
  std::vector<Ids> sparse;   // feature by feature
};

}  // namespace recapp

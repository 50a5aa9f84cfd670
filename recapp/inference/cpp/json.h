// JSON (RFC 8259): a manifest, and rows of the input.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace recapp {

struct Json {
  enum class Kind { null, boolean, integer, large, number, text, array, object };

  Kind kind = Kind::null;
  bool flag = false;
  std::int64_t integer = 0;   // of `integer`
  std::uint64_t large = 0;    // of `large`: an integer from 2^63 to 2^64 - 1
  double number = 0;          // of `number`: anything with a point or an exponent, or larger
  std::string text;
  std::vector<std::string> keys;  // of `object`, beside `items`
  std::vector<Json> items;

  bool is(Kind wanted) const { return kind == wanted; }
  // Return an entry of an object, or nullptr.
  const Json* find(std::string_view key) const;
};

// What is wrong with a text, and at which byte.
struct JsonError : Error {
  JsonError(const std::string& why, std::size_t at)
      : Error(why + " at byte " + std::to_string(at + 1)) {}
};

// Return the value that a text spells. Keys that occur twice, invalid UTF-8 and more than 64 nested
// lists or objects are errors (JsonError).
Json parse_json(std::string_view text);

// Return a text as JSON spells it.
std::string json_text(std::string_view text);

}  // namespace recapp

#include "decode.h"

#include <charconv>
#include <cmath>
#include <cstring>

namespace recapp {
namespace {

constexpr std::uint64_t P1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t P2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t P3 = 0x165667B19E3779F9U;
constexpr std::uint64_t P4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t P5 = 0x27D4EB2F165667C5U;
const char* const RESERVED = ", the one number that is no id: it stands for a missing one";

std::uint64_t rotated(std::uint64_t value, int bits) {
  return value << bits | value >> (64 - bits);
}

// Return the little-endian number in some bytes.
std::uint64_t word(const char* at, int size) {
  std::uint64_t made = 0;
  for (int i = 0; i < size; ++i) {
    made |= static_cast<std::uint64_t>(static_cast<unsigned char>(at[i])) << (8 * i);
  }
  return made;
}

std::uint64_t mixed(std::uint64_t state, std::uint64_t lane) {
  return rotated(state + lane * P2, 31) * P1;
}

// Whether text spells an int64 as it is printed: without a plus, a leading zero or "-0".
bool is_decimal(std::string_view text, std::int64_t& made) {
  const bool negative = text[0] == '-';
  const std::string_view digits = text.substr(negative);
  if (digits.empty() || digits[0] < '0' || digits[0] > '9') return false;
  if (digits[0] == '0' && (negative || digits.size() > 1)) return false;
  const auto end = text.data() + text.size();
  const auto found = std::from_chars(text.data(), end, made);
  return found.ec == std::errc() && found.ptr == end;
}

std::int64_t id_of_hex(std::string_view text) {
  std::uint64_t made = 0;
  const char* end = text.data() + text.size();
  // from_chars would take a sign
  const bool digits = text.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
  if (text.size() > 16 || !digits || std::from_chars(text.data(), end, made, 16).ptr != end) {
    throw BadValue("holds " + shown(text) +
                   "; an id of a hexadecimal feature has at most 16 hexadecimal digits");
  }
  const auto id = static_cast<std::int64_t>(made);
  if (id == MISSING) throw BadValue("holds " + shown(text) + RESERVED);
  return id;
}

std::int64_t id_of_text(std::string_view text, TextIds way) {
  if (text.empty()) return MISSING;
  if (way == TextIds::hex) return id_of_hex(text);
  std::int64_t made = 0;
  if (is_decimal(text, made)) {
    if (made == MISSING) throw BadValue("holds " + shown(text) + RESERVED);
    return made;
  }
  if (way == TextIds::integers) {
    throw BadValue("holds " + shown(text) +
                   ", which is no integer; only a feature whose table has id_rule=hash takes any "
                   "text for an id");
  }
  made = static_cast<std::int64_t>(xxh64(text));
  return made == MISSING ? MISSING + 1 : made;
}

std::string printed(double value) {
  char made[32];
  const auto end = std::to_chars(made, made + sizeof made, value).ptr;
  return {made, end};
}

float finite(float made, double value) {
  if (!std::isfinite(made)) {
    throw BadValue("holds " + printed(value) +
                   ", which is not finite in 32 bits; write a number up to 3.4e38, or null where "
                   "it is missing, which counts as 0");
  }
  return made;
}

double spelled(std::string_view text) {
  const std::string_view whole = text;
  // from_chars takes no plus, and Arrow does
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  double made = 0;
  const char* end = text.data() + text.size();
  const auto found = std::from_chars(text.data(), end, made);
  if (found.ptr != end || found.ec == std::errc::invalid_argument) {
    throw BadValue("holds " + shown(whole) + ", which is not a number");
  }
  if (found.ec != std::errc()) made = std::strtod(std::string(text).c_str(), nullptr);
  return made;
}

}  // namespace

std::uint64_t xxh64(std::string_view text) {
  const char* at = text.data();
  const char* end = at + text.size();
  std::uint64_t value = P5;
  if (text.size() >= 32) {
    std::uint64_t state[4] = {P1 + P2, P2, 0, 0 - P1};
    for (; end - at >= 32; at += 32) {
      for (int i = 0; i < 4; ++i) state[i] = mixed(state[i], word(at + 8 * i, 8));
    }
    value = rotated(state[0], 1) + rotated(state[1], 7) + rotated(state[2], 12) +
            rotated(state[3], 18);
    for (const std::uint64_t part : state) value = (value ^ mixed(0, part)) * P1 + P4;
  }
  value += text.size();
  for (; end - at >= 8; at += 8) value = rotated(value ^ mixed(0, word(at, 8)), 27) * P1 + P4;
  if (end - at >= 4) {
    value = rotated(value ^ word(at, 4) * P1, 23) * P2 + P3;
    at += 4;
  }
  for (; at < end; ++at) value = rotated(value ^ word(at, 1) * P5, 11) * P1;
  value = (value ^ value >> 33) * P2;
  value = (value ^ value >> 29) * P3;
  return value ^ value >> 32;
}

std::int64_t id_of(const Value& value, TextIds way) {
  using Kind = Value::Kind;
  if (value.kind == Kind::null) return MISSING;
  if (value.kind == Kind::text) return id_of_text(value.text, way);
  if (value.kind == Kind::boolean) {
    throw BadValue("holds a boolean; an id must be an integer or text");
  }
  if (value.kind == Kind::number) {
    if (std::isnan(value.number)) return MISSING;
    if (value.number != std::floor(value.number) || !(std::fabs(value.number) < 0x1p53)) {
      throw BadValue("holds " + printed(value.number) + "; an id must be an integer or text");
    }
    return static_cast<std::int64_t>(value.number);
  }
  if (value.kind == Kind::large && way != TextIds::hex) {
    return id_of_text(std::to_string(value.large), way);
  }
  std::int64_t id = value.kind == Kind::large ? static_cast<std::int64_t>(value.large)
                                              : value.integer;
  // a 32-bit hash that lost its sign
  if (value.half && way == TextIds::hex) id &= 0xFFFFFFFFLL;
  if (id == MISSING) throw BadValue("holds " + std::to_string(id) + RESERVED);
  return id;
}

std::int64_t time_of(const Value& value, std::int64_t ticks) {
  std::int64_t found = 0;
  try {
    found = id_of(value, TextIds::integers);
  } catch (const BadValue&) {
    throw BadValue("holds no time, which is a whole number");
  }
  if (found == MISSING) return MISSING;
  if (ticks < 0) return found * -ticks;
  return found / ticks - (found % ticks < 0);
}

float number_of(const Value& value) {
  using Kind = Value::Kind;
  switch (value.kind) {
    case Kind::null: return 0;
    case Kind::boolean:
    case Kind::integer: return static_cast<float>(value.integer);
    case Kind::large: return static_cast<float>(value.large);
    case Kind::number: return finite(static_cast<float>(value.number), value.number);
    case Kind::text: break;
  }
  if (value.text.empty()) return 0;
  const double found = spelled(value.text);
  return finite(static_cast<float>(found), found);
}

bool is_missing(const Value& value) {
  return value.kind == Value::Kind::null ||
         (value.kind == Value::Kind::text && value.text.empty());
}

float transformed(float value, Transform transform) {
  switch (transform) {
    // logarithms in 64 bits round to the same 32 bits in every library (recapp/dataset/collate.py)
    case Transform::log1p: return static_cast<float>(std::log1p(double{value > 0 ? value : 0.0F}));
    case Transform::log3:
      return static_cast<float>(std::log(double{(value > -2 ? value : -2.0F) + 3.0F}));
    case Transform::none: break;
  }
  return value;
}

}  // namespace recapp

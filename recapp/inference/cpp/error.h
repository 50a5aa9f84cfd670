// What ends the program: one line on standard error, and exit code 1.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace recapp {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Why a value of the input cannot be read; whoever knows its row and feature makes an Error of it.
struct BadValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Text of others in a message: quoted, in one line, cut to 40 bytes.
inline std::string shown(std::string_view text) {
  std::string made = "'";
  for (unsigned char c : text.substr(0, 40)) {
    made += c < 32 || c == 127 ? '?' : static_cast<char>(c);
  }
  return made + "'";
}

inline std::string first_line(const std::string& text) {
  return text.substr(0, text.find_first_of("\r\n"));
}

}  // namespace recapp

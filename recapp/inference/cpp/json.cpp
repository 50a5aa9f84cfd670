#include "json.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <unordered_set>

namespace recapp {
namespace {

constexpr int DEEPEST = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json whole() {
    Json made = value(0);
    skip_space();
    if (at_ != text_.size()) fail("something follows the value");
    return made;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw JsonError(at_ >= text_.size() ? "the text ends too early" : why, at_);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' ||
                                  text_[at_] == '\r')) {
      ++at_;
    }
  }

  bool take(char wanted) {
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(int depth) {
    if (depth > DEEPEST) fail("values are nested too deeply");
    skip_space();
    Json made;
    const char c = peek();
    if (c == '{') return object(depth);
    if (c == '[') return array(depth);
    if (c == '"') {
      made.kind = Json::Kind::text;
      made.text = string();
      return made;
    }
    if (c == '-' || (c >= '0' && c <= '9')) return number();
    if (take_word("null")) return made;
    made.kind = Json::Kind::boolean;
    made.flag = c == 't';
    if (take_word("true") || take_word("false")) return made;
    fail("no JSON value");
  }

  Json object(int depth) {
    Json made;
    made.kind = Json::Kind::object;
    ++at_;
    skip_space();
    if (take('}')) return made;
    do {
      skip_space();
      if (peek() != '"') fail("a key must be text");
      made.keys.push_back(string());
      skip_space();
      if (!take(':')) fail("a colon is missing");
      made.items.push_back(value(depth + 1));
      skip_space();
    } while (take(','));
    if (!take('}')) fail("a comma or brace is missing");
    std::unordered_set<std::string_view> seen;
    for (const std::string& key : made.keys) {
      if (!seen.insert(key).second) throw JsonError("key " + shown(key) + " occurs twice", at_ - 1);
    }
    return made;
  }

  Json array(int depth) {
    Json made;
    made.kind = Json::Kind::array;
    ++at_;
    skip_space();
    if (take(']')) return made;
    do {
      made.items.push_back(value(depth + 1));
      skip_space();
    } while (take(','));
    if (!take(']')) fail("a comma or bracket is missing");
    return made;
  }

  void digits() {
    if (peek() < '0' || peek() > '9') fail("a digit is missing");
    while (peek() >= '0' && peek() <= '9') ++at_;
  }

  Json number() {
    const std::size_t first = at_;
    take('-');
    if (!take('0')) digits();
    bool whole = true;
    if (take('.')) {
      whole = false;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      whole = false;
      ++at_;
      if (!take('+')) take('-');
      digits();
    }
    const char* begin = text_.data() + first;
    const char* end = text_.data() + at_;
    Json made;
    made.kind = Json::Kind::integer;
    if (whole && std::from_chars(begin, end, made.integer).ec == std::errc()) return made;
    made.kind = Json::Kind::large;
    if (whole && std::from_chars(begin, end, made.large).ec == std::errc()) return made;
    made.kind = Json::Kind::number;
    if (std::from_chars(begin, end, made.number).ec != std::errc()) {
      made.number = std::strtod(std::string(begin, end).c_str(), nullptr);  // infinity or 0
    }
    return made;
  }

  unsigned hex4() {
    unsigned made = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("\\u needs four hexadecimal digits");
      made = made * 16 + static_cast<unsigned>(digit);
    }
    return made;
  }

  void escaped(std::string& made) {
    const char c = peek();
    static constexpr std::string_view from = "\"\\/bfnrt";
    static constexpr std::string_view to = "\"\\/\b\f\n\r\t";
    const std::size_t which = at_ < text_.size() ? from.find(c) : std::string_view::npos;
    if (which != std::string_view::npos) {
      ++at_;
      made += to[which];
      return;
    }
    if (!take('u')) fail("no such escape");
    unsigned code = hex4();
    if (code >= 0xDC00 && code < 0xE000) fail("half of a pair of surrogates");
    if (code >= 0xD800 && code < 0xDC00) {
      if (!take_word("\\u")) fail("half of a pair of surrogates");
      const unsigned low = hex4();
      if (low < 0xDC00 || low >= 0xE000) fail("half of a pair of surrogates");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(made, code);
  }

  static void append_utf8(std::string& made, unsigned code) {
    if (code < 0x80) {
      made += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    const unsigned head = more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0;
    made += static_cast<char>(head | code >> (6 * more));
    for (int i = more - 1; i >= 0; --i) made += static_cast<char>(0x80 | ((code >> (6 * i)) & 63));
  }

  // Take a character of more than one byte.
  void utf8(std::string& made) {
    const auto byte = [&](std::size_t i) {
      return i < text_.size() ? static_cast<unsigned char>(text_[i]) : 0U;
    };
    const unsigned head = byte(at_);
    const int more = head >= 0xC2 && head < 0xE0 ? 1 : head >= 0xE0 && head < 0xF0 ? 2
                     : head >= 0xF0 && head < 0xF5 ? 3 : 0;
    if (!more) fail("text is no UTF-8");
    unsigned code = head & (0x3FU >> more);
    for (int i = 1; i <= more; ++i) {
      const unsigned next = byte(at_ + i);
      if ((next & 0xC0) != 0x80) fail("text is no UTF-8");
      code = code << 6 | (next & 63);
    }
    const unsigned least = more == 1 ? 0x80 : more == 2 ? 0x800 : 0x10000;
    if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
      fail("text is no UTF-8");
    }
    made.append(text_.substr(at_, static_cast<std::size_t>(more) + 1));
    at_ += static_cast<std::size_t>(more) + 1;
  }

  std::string string() {
    std::string made;
    ++at_;
    while (true) {
      if (at_ >= text_.size()) fail("text has no end");
      const auto c = static_cast<unsigned char>(text_[at_]);
      if (take('"')) return made;
      if (take('\\')) {
        escaped(made);
      } else if (c < 32) {
        fail("a control character in text");
      } else if (c >= 0x80) {
        utf8(made);
      } else {
        made += text_[at_++];
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view key) const {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == key) return &items[i];
  }
  return nullptr;
}

Json parse_json(std::string_view text) { return Parser(text).whole(); }

std::string json_text(std::string_view text) {
  std::string made = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 32) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      made += code;
      continue;
    }
    if (c == '"' || c == '\\') made += '\\';
    made += c;
  }
  return made + "\"";
}

}  // namespace recapp

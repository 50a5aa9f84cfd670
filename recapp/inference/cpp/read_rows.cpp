#include "read_rows.h"

#include <cmath>

namespace recapp {

RowsBuilder::RowsBuilder(const Artefact& artefact) : artefact_(artefact) {
  rows_.sparse.resize(artefact.sparse.size());
}

const std::string& RowsBuilder::name(int feature) const {
  const auto at = static_cast<std::size_t>(feature);
  if (is_vector(feature)) return vector(feature).name;
  if (is_time(feature)) return artefact_.times[feature - times()].name;
  return is_dense(feature) ? artefact_.dense[at] : artefact_.sparse[at - artefact_.dense.size()];
}

void RowsBuilder::add_rows(std::int64_t count) {
  rows_.count += count;
  rows_.dense.resize(static_cast<std::size_t>(rows_.count) * artefact_.dense.size());
  const auto rows = static_cast<std::size_t>(rows_.count);
  if (!artefact_.derived.empty()) raw_.numbers.resize(rows_.dense.size());
  raw_.times.resize(rows * artefact_.times.size());
  raw_.vectors.resize(rows * artefact_.vector_numbers);
}

void RowsBuilder::add_time(int feature, std::int64_t row, const Value& value, std::int64_t ticks) {
  const std::size_t place = feature - times();
  const std::size_t at = static_cast<std::size_t>(row) * artefact_.times.size() + place;
  raw_.times[at] = time_of(value, ticks ? ticks : artefact_.times[place].ticks);
}

void RowsBuilder::check_length(int feature, std::int64_t length) const {
  const auto width = static_cast<std::int64_t>(vector(feature).width);
  if (length != width) {
    throw BadValue("holds a list of " + std::to_string(length) + " values; a vector has " +
                   std::to_string(width));
  }
}

void RowsBuilder::add_to_vector(int feature, std::int64_t row, std::int64_t place,
                                const Value& value) {
  const std::size_t at = static_cast<std::size_t>(row) * artefact_.vector_numbers +
                         vector(feature).first + static_cast<std::size_t>(place);
  raw_.vectors[at] = number_of(value);
}

void RowsBuilder::add_number(int feature, std::int64_t row, const Value& value) {
  const std::size_t at = static_cast<std::size_t>(row) * artefact_.dense.size() + feature;
  const float number = number_of(value);
  rows_.dense[at] = transformed(number, artefact_.transform);
  if (!raw_.numbers.empty()) raw_.numbers[at] = is_missing(value) ? NAN : number;
}

void RowsBuilder::add_id(int feature, const Value& value) {
  const std::string& separator = artefact_.separators[sparse(feature)];
  if (separator.empty() || value.kind != Value::Kind::text) return add_one(feature, value);
  begin_list(feature);
  std::string_view left = value.text;
  while (true) {
    const std::size_t end = left.find(separator);
    Value part = value;
    part.text = left.substr(0, end);
    add_to_list(feature, part);
    if (end == std::string_view::npos) return;
    left.remove_prefix(end + separator.size());
  }
}

void RowsBuilder::add_one(int feature, const Value& value) {
  ids(feature).ids.push_back(id_of(value, artefact_.text[sparse(feature)]));
}

void RowsBuilder::add_to_list(int feature, const Value& value) {
  add_one(feature, value);
  if (is_absent(sparse(feature), ids(feature).ids.back())) ids(feature).ids.pop_back();
}

bool RowsBuilder::is_absent(std::size_t sparse, std::int64_t id) const {
  return id == MISSING || id == artefact_.padding[sparse];
}

Rows RowsBuilder::finish() {
  for (std::size_t i = 0; i < rows_.sparse.size(); ++i) {
    Ids& of = rows_.sparse[i];
    // a missing value is an empty bag where rows had bags in training, else one missing id
    const bool none = artefact_.lists.empty() ? of.lists : artefact_.lists[i];
    if (!none) continue;
    of.lists = true;
    std::size_t kept = 0;
    std::size_t at = 0;
    for (std::int64_t& end : of.ends) {
      for (; at < static_cast<std::size_t>(end); ++at) {
        if (!is_absent(i, of.ids[at])) of.ids[kept++] = of.ids[at];
      }
      end = static_cast<std::int64_t>(kept);
    }
    of.ids.resize(kept);
  }
  if (!artefact_.derived.empty() || !artefact_.vectors.empty()) derive(artefact_, raw_, rows_);
  return std::move(rows_);
}

namespace {

constexpr int SHOWN_NAMES = 8;  // of a row, in an error

// Reads JSON lines.
class JsonRows {
 public:
  JsonRows(const Artefact& artefact, const std::string& source)
      : builder_(artefact), source_(source) {
    for (int i = 0; i < builder_.features(); ++i) numbers_[builder_.name(i)] = i;
  }

  void add(std::string_view line, std::int64_t number) {
    line_ = number;
    try {
      const Json row = parse_json(line);
      if (!row.is(Json::Kind::object)) throw JsonError("a row must be an object", 0);
      add_row(row, number);
    } catch (const JsonError& error) {
      fail(error.what());
    }
  }

  // Add an object, the row of a line.
  void add_row(const Json& row, std::int64_t number) {
    line_ = number;
    builder_.add_rows(1);
    add(row);
    ++count_;
  }

  Rows finish() { return builder_.finish(); }
  std::int64_t count() const { return count_; }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(source_ + " line " + std::to_string(line_) + ": " + why);
  }

  void add(const Json& row) {
    std::vector<const Json*> given(static_cast<std::size_t>(builder_.features()), nullptr);
    for (std::size_t i = 0; i < row.keys.size(); ++i) {
      const auto found = numbers_.find(row.keys[i]);
      if (found != numbers_.end()) given[static_cast<std::size_t>(found->second)] = &row.items[i];
    }
    for (int i = 0; i < builder_.features(); ++i) {
      const Json* value = given[static_cast<std::size_t>(i)];
      if (!value) {
        fail("feature " + builder_.name(i) + " is missing; write null where it has no value" +
             other_names(row));
      }
      try {
        add(i, *value);
      } catch (const BadValue& error) {
        fail("feature " + builder_.name(i) + " " + error.what());
      }
    }
  }

  void add(int feature, const Json& value) {
    if (builder_.is_dense(feature)) {
      if (value.is(Json::Kind::boolean)) throw BadValue("holds a boolean, which is not a number");
      builder_.add_number(feature, count_, value_of(value, "a number, or text that spells one"));
      return;
    }
    if (builder_.is_time(feature)) {
      builder_.add_time(feature, count_, value_of(value, "a whole number"));
      return;
    }
    const bool list = value.is(Json::Kind::array);
    if (builder_.is_vector(feature)) {
      if (!list && !value.is(Json::Kind::null)) throw BadValue("holds no list of numbers");
      if (list) builder_.check_length(feature, static_cast<std::int64_t>(value.items.size()));
      for (std::size_t i = 0; i < value.items.size(); ++i) {
        if (value.items[i].is(Json::Kind::text) || value.items[i].is(Json::Kind::boolean)) {
          throw BadValue("holds text or a boolean in a list of numbers");
        }
        builder_.add_to_vector(feature, count_, static_cast<std::int64_t>(i),
                               value_of(value.items[i], "a number"));
      }
      return;
    }
    if (list) {
      builder_.begin_list(feature);
      for (const Json& item : value.items) {
        builder_.add_to_list(feature, value_of(item, "an integer or text"));
      }
    } else {
      builder_.add_id(feature, value_of(value, "an integer, text, or a list of those"));
    }
    builder_.end_row(feature);
  }

  static Value value_of(const Json& json, const char* allowed) {
    Value made;
    switch (json.kind) {
      case Json::Kind::null: break;
      case Json::Kind::boolean:
        made.kind = Value::Kind::boolean;
        made.integer = json.flag;
        break;
      case Json::Kind::integer:
        made.kind = Value::Kind::integer;
        made.integer = json.integer;
        break;
      case Json::Kind::large:
        made.kind = Value::Kind::large;
        made.large = json.large;
        break;
      case Json::Kind::number:
        made.kind = Value::Kind::number;
        made.number = json.number;
        break;
      case Json::Kind::text:
        made.kind = Value::Kind::text;
        made.text = json.text;
        break;
      default:
        throw BadValue(std::string("holds ") +
                       (json.is(Json::Kind::array) ? "a list" : "an object") + "; allowed: " +
                       allowed);
    }
    return made;
  }

  // What a misspelt feature may be found by: names of the row that are no features.
  std::string other_names(const Json& row) const {
    std::string names;
    int count = 0;
    for (const std::string& key : row.keys) {
      if (numbers_.count(key)) continue;
      if (++count > SHOWN_NAMES) return names + ", ...";
      names += (count == 1 ? "; of other names the row has " : ", ") + shown(key);
    }
    return names;
  }

  RowsBuilder builder_;
  std::string source_;
  std::map<std::string, int> numbers_;
  std::int64_t line_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace

Rows read_json(std::string_view text, const Artefact& artefact, const std::string& source) {
  JsonRows rows(artefact, source);
  std::int64_t line = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    ++line;
    const std::string_view here = text.substr(0, end);
    // an empty line is no row
    if (here.find_first_not_of(" \t\r") != std::string_view::npos) rows.add(here, line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return rows.finish();
}

Rows read_rows(const std::vector<Json>& objects, const Artefact& artefact,
               const std::string& source) {
  JsonRows rows(artefact, source);
  std::int64_t number = 0;
  for (const Json& row : objects) {
    if (!row.is(Json::Kind::object)) artefact.damaged("its example is not rows");
    rows.add_row(row, ++number);
  }
  return rows.finish();
}

bool looks_like_arrow(std::string_view bytes) {
  return bytes.substr(0, 6) == "ARROW1" || bytes.substr(0, 4) == "\xFF\xFF\xFF\xFF";
}

#ifndef RECAPP_ARROW
bool has_arrow() { return false; }

Rows read_arrow(std::string_view, const Artefact&, const std::string& source) {
  throw Error(source +
              " is Arrow, and this program was built without it: send JSON lines, or build it "
              "where pyarrow or Arrow's libraries are");
}
#endif

}  // namespace recapp

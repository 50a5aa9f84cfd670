#include "tables.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace recapp {
namespace {

constexpr std::int64_t LARGEST = std::numeric_limits<std::int64_t>::max();

std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352DU;
  x ^= x >> 15;
  x *= 0x846CA68BU;
  return x ^ x >> 16;
}

// Return the position of a key of a dynamic table (recapp/tables/positions.py).
std::int64_t position_of(std::int64_t key) {
  auto x = static_cast<std::uint64_t>(key);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return static_cast<std::int64_t>(x ^ x >> 31);
}

template <typename T>
void put(std::vector<std::uint8_t>& row, std::size_t at, T value) {
  std::memcpy(row.data() + at, &value, sizeof value);
}

// Write floats as a packed row of 8 or 4 bits (recapp/kernels/quantised.py).
template <typename Number>
void quantise(const std::vector<float>& values, int bits, std::vector<std::uint8_t>& row) {
  const float top = bits == 8 ? 255.0F : 15.0F;
  const float low = *std::min_element(values.begin(), values.end()) + 0.0F;
  const float high = *std::max_element(values.begin(), values.end());
  const Number bias = static_cast<Number>(low);
  const Number scale =
      static_cast<Number>(std::max((high - static_cast<float>(bias)) / top, 0.0F));
  if (!std::isfinite(static_cast<float>(scale) * top + static_cast<float>(bias))) {
    throw Error("start values are too large for " + std::to_string(bits) + " bits");
  }
  const float step = static_cast<float>(scale) > 0 ? static_cast<float>(scale) : 1.0F;
  for (std::size_t d = 0; d < values.size(); ++d) {
    const float exact = std::nearbyint((values[d] - static_cast<float>(bias)) / step);
    const auto q = static_cast<std::uint8_t>(std::min(std::max(exact, 0.0F), top));
    row[d * static_cast<std::size_t>(bits) / 8] |=
        static_cast<std::uint8_t>(bits == 8 ? q : q << (d % 2 * 4));
  }
  put(row, row.size() - 2 * sizeof(Number), scale);
  put(row, row.size() - sizeof(Number), bias);
}

// Return the start value of a key (recapp/tables/initial.py) as rows of its table are stored.
std::vector<std::uint8_t> start_row(const Table& t, std::int64_t key) {
  const auto bits = static_cast<std::uint64_t>(key);
  const std::uint32_t seed = mixed(static_cast<std::uint32_t>(bits >> 32) + t.start_hash);
  const std::uint32_t hash = mixed(static_cast<std::uint32_t>(bits) ^ seed);
  const double scale = t.start_range / 0x1p24;
  std::vector<std::uint8_t> row(static_cast<std::size_t>(row_bytes(t.storage, t.dim)));
  std::vector<float> values(static_cast<std::size_t>(t.dim));
  for (std::size_t d = 0; d < values.size(); ++d) {
    const std::uint32_t drawn = mixed(hash + static_cast<std::uint32_t>(d) * 0x9E3779B9U);
    const std::int32_t odd = static_cast<std::int32_t>(drawn >> 8) * 2 + (1 - (1 << 24));
    if (t.storage == Storage::fp64) put(row, d * 8, odd * scale);
    values[d] = static_cast<float>(odd) * static_cast<float>(scale);
    if (t.storage == Storage::fp32) put(row, d * 4, values[d]);
    if (t.storage == Storage::fp16) put(row, d * 2, c10::Half(values[d]));
    if (t.storage == Storage::bf16) put(row, d * 2, c10::BFloat16(values[d]));
  }
  if (t.storage == Storage::int8) quantise<float>(values, 8, row);
  if (t.storage == Storage::int4) quantise<c10::Half>(values, 4, row);
  return row;
}

// Return the number of a position among ascending ones, or -1. Positions are spread evenly, so a
// guess is near.
std::int64_t find(const std::int64_t* positions, std::int64_t rows, std::int64_t position) {
  if (rows == 0) return -1;
  const auto from_0 = static_cast<std::uint64_t>(position) ^ (std::uint64_t{1} << 63);
  const auto guess = static_cast<std::int64_t>(
      static_cast<unsigned __int128>(from_0) * static_cast<std::uint64_t>(rows) >> 64);
  std::int64_t low = guess;
  std::int64_t high = guess + 1;  // what is sought stands in low .. high
  for (std::int64_t step = 8; low > 0 && positions[low] > position; step *= 2) {
    high = low;
    low = std::max<std::int64_t>(low - step, 0);
  }
  for (std::int64_t step = 8; high < rows && positions[high] <= position; step *= 2) {
    low = high;
    high = std::min(high + step, rows);
  }
  const std::int64_t* found = std::lower_bound(positions + low, positions + high, position);
  return found < positions + high && *found == position ? found - positions : -1;
}

// Return the id counted from the table's min_key; one that is far outside is next to it then.
std::int64_t from_min_key(const Table& t, std::int64_t id) {
  if (t.min_key == 0 || id == MISSING) return id;
  const auto low = static_cast<__int128>(t.min_key) - 1;
  const auto high = static_cast<__int128>(t.min_key) + t.rows;
  return static_cast<std::int64_t>(std::min(std::max<__int128>(id, low), high) - t.min_key);
}

// Return the row of an id, or -1 where it is outside.
std::int64_t row_of(const Table& t, std::int64_t id) {
  const std::int64_t number = from_min_key(t, id);
  if (id == MISSING) return 0;
  if (t.rule == Rule::hash) {
    const std::int64_t rest = number % (t.rows - 1);
    return 1 + (rest < 0 ? rest + t.rows - 1 : rest);
  }
  if (number >= 0 && number < t.rows) return number;
  if (t.rule == Rule::clamp) return number < 0 ? 0 : t.rows - 1;
  return -1;
}

[[noreturn]] void outside(const Table& t, const std::string& feature, const Lookup& x,
                          std::int64_t id, std::int64_t row) {
  const bool named = x.output != feature && x.output != feature + "@" + t.name;
  throw Error("row " + std::to_string(row) + ": table " + t.name + ": " +
              (named ? "lookup " + x.output + ": " : "") + "feature " + feature + " has the id " +
              std::to_string(id) + ", which is outside its " + std::to_string(t.rows) + " rows (" +
              std::to_string(t.min_key) + ".." + std::to_string(t.min_key + (t.rows - 1)) +
              "): give the table more rows, or set its id_rule to hash, clamp or drop");
}

// Finds rows of a lookup.
class Finder {
 public:
  Finder(const Artefact& artefact, const MappedTables& tables, const Lookup& lookup)
      : table_(artefact.tables[lookup.table]),
        rows_(tables.rows(lookup.table)),
        positions_(tables.positions(lookup.table)),
        width_(row_bytes(table_.storage, table_.dim)) {}

  // Return where the row of an id is, or nullptr where it is outside.
  const std::uint8_t* find(std::int64_t id, FoundRows& found) const {
    if (table_.rule != Rule::dynamic) {
      const std::int64_t row = row_of(table_, id);
      return row < 0 ? nullptr : rows_ + row * width_;
    }
    const std::int64_t row = recapp::find(positions_, table_.rows, position_of(id));
    if (row >= 0) return rows_ + row * width_;
    found.start.push_back(start_row(table_, id));
    return found.start.back().data();
  }

 private:
  const Table& table_;
  const std::uint8_t* rows_;
  const std::int64_t* positions_;
  std::int64_t width_;
};

}  // namespace

MappedTables::MappedTables(const Artefact& artefact, bool verify) {
  const auto map = [&](const std::string& file) {
    auto& held = files_[file];
    if (!held) {
      held = std::make_unique<MappedFile>(artefact.path(file), file);
      // a file may have changed since its size was compared
      if (held->size() != artefact.files.at(file).bytes) artefact.damaged(file + " has changed");
      if (verify) artefact.verify(file, *held);
    }
    return held->data();
  };
  for (const Table& t : artefact.tables) {
    rows_.push_back(map(t.file) + t.first_row * row_bytes(t.storage, t.dim));
    const bool dynamic = t.rule == Rule::dynamic;
    positions_.push_back(
        dynamic ? reinterpret_cast<const std::int64_t*>(map(t.keys)) + t.first_row : nullptr);
  }
}

FoundRows find_rows(const Artefact& artefact, const MappedTables& tables, const Lookup& lookup,
                    const Ids& ids, std::int64_t first, std::int64_t count) {
  const Table& t = artefact.tables[lookup.table];
  const Finder finder(artefact, tables, lookup);
  const std::string& feature = artefact.features[lookup.feature];
  const std::int64_t most = lookup.pooling == Pooling::concat ? lookup.hotness : LARGEST;
  FoundRows found;
  found.lengths.reserve(static_cast<std::size_t>(count));
  std::int64_t begin = first ? ids.ends[static_cast<std::size_t>(first - 1)] : 0;
  found.rows.reserve(static_cast<std::size_t>(
      count ? ids.ends[static_cast<std::size_t>(first + count - 1)] - begin : 0));
  for (std::int64_t row = first; row < first + count; ++row) {
    const std::int64_t end = ids.ends[static_cast<std::size_t>(row)];
    if (end - begin > most && !lookup.truncates) {
      throw Error("row " + std::to_string(row) + ": lookup " + lookup.output + ": feature " +
                  feature + " has a bag of " + std::to_string(end - begin) +
                  " ids, a concatenation of hotness=" + std::to_string(most) + " takes " +
                  std::to_string(most) +
                  ": raise hotness, or set truncates to leave the last ids out");
    }
    const std::size_t before = found.rows.size();
    for (std::int64_t at = begin; at < begin + std::min(most, end - begin); ++at) {
      const std::int64_t id = ids.ids[static_cast<std::size_t>(at)];
      const std::uint8_t* where = finder.find(id, found);
      if (!where && t.rule == Rule::error) outside(t, feature, lookup, id, row);
      if (where) found.rows.push_back(where);
    }
    found.lengths.push_back(static_cast<std::int64_t>(found.rows.size() - before));
    begin = end;
  }
  return found;
}

}  // namespace recapp

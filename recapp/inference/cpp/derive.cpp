#include "derive.h"

#include <algorithm>
#include <cmath>

namespace recapp {
namespace {

// Return the ids of the buckets of a number, one for each row.
Ids bucket_ids(const Artefact& artefact, const Derived& column, const std::vector<float>& numbers,
               std::int64_t count) {
  Ids made;
  const float* begin = column.edges.data();
  const float* end = begin + column.edges.size();
  for (std::int64_t row = 0; row < count; ++row) {
    const float number = numbers[static_cast<std::size_t>(row) * artefact.dense.size() +
                                 column.reads[0]];
    const std::int64_t below = std::upper_bound(begin, end, number) - begin;
    made.ids.push_back(std::isnan(number) ? MISSING : below + 1);
    made.ends.push_back(row + 1);
  }
  return made;
}

// Return the part of the way between the ends of a piece that a number has gone; 0 for NaN.
float way_gone(const Derived& column, float number) {
  if (column.edges.empty() || std::isnan(number)) return 0;
  const double first = column.edges[0];
  const auto way = static_cast<float>((number - first) / (column.edges[1] - first));
  return std::min(std::max(way, 0.0F), 1.0F);
}

// Return the hashes of the ids of several features, one for each row.
Ids crossed(const Artefact& artefact, const Derived& column, const Rows& rows) {
  Ids made;
  for (const std::size_t feature : column.reads) {
    if (rows.sparse[feature].lists) {
      throw Error("feature " + artefact.features[feature] + " holds lists, and " +
                  artefact.features[column.makes] + " crosses one id of each feature");
    }
  }
  std::string bytes(8 * column.reads.size(), '\0');
  for (std::int64_t row = 0; row < rows.count; ++row) {
    for (std::size_t i = 0; i < column.reads.size(); ++i) {
      const auto id = static_cast<std::uint64_t>(
          rows.sparse[column.reads[i]].ids[static_cast<std::size_t>(row)]);
      for (int byte = 0; byte < 8; ++byte) {
        bytes[8 * i + byte] = static_cast<char>(id >> (8 * byte) & 0xFF);
      }
    }
    const auto id = static_cast<std::int64_t>(xxh64(bytes));
    made.ids.push_back(id == MISSING ? MISSING + 1 : id);
    made.ends.push_back(row + 1);
  }
  return made;
}

constexpr std::int64_t DAY = 86400;
constexpr double HALF_PI = 1.5707963267948966;

std::int64_t remainder(std::int64_t value, std::int64_t of) {
  const std::int64_t found = value % of;
  return found < 0 ? found + of : found;
}

// Return the ids of the hours or weekdays of a time, one for each row.
Ids dates(const Artefact& artefact, const Derived& column, const Raw& raw, std::int64_t count) {
  Ids made;
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t time =
        raw.times[static_cast<std::size_t>(row) * artefact.times.size() + column.reads[0]];
    const std::int64_t day = time / DAY - (time % DAY < 0);
    const std::int64_t id = column.kind == DerivedKind::hour ? remainder(time, DAY) / 3600
                                                             : remainder(day + 3, 7);
    made.ids.push_back(time == MISSING ? MISSING : id + 1);
    made.ends.push_back(row + 1);
  }
  return made;
}

// Return the sine or cosine of a turn: Taylor's sums within a quarter, in the order of operations of
// recapp/dataset/rows.py.
float circle(double turns, bool cosine) {
  static const double sines[] = {1,
                                 -1.0 / 6,
                                 1.0 / 120,
                                 -1.0 / 5040,
                                 1.0 / 362880,
                                 -1.0 / 39916800,
                                 1.0 / 6227020800,
                                 -1.0 / 1307674368000};
  static const double cosines[] = {1,
                                   -1.0 / 2,
                                   1.0 / 24,
                                   -1.0 / 720,
                                   1.0 / 40320,
                                   -1.0 / 3628800,
                                   1.0 / 479001600,
                                   -1.0 / 87178291200,
                                   1.0 / 20922789888000};
  const double quarters = turns * 4;
  const double whole = std::floor(quarters);
  const double angle = (quarters - whole) * HALF_PI;
  const double square = angle * angle;
  const int quarter = (static_cast<int>(whole) + (cosine ? 1 : 0)) % 4;
  double made = quarter % 2 ? cosines[8] : sines[7];
  for (int i = quarter % 2 ? 7 : 6; i >= 0; --i) {
    made = made * square + (quarter % 2 ? cosines[i] : sines[i]);
  }
  if (quarter % 2 == 0) made *= angle;
  return static_cast<float>(quarter >= 2 ? -made : made);
}

// Return the sine or cosine of the part of a period that a row's number or time is in.
float on_circle(const Artefact& artefact, const Derived& column, const Raw& raw, std::size_t row) {
  const bool cosine = column.kind == DerivedKind::cosine;
  const double period = column.edges[0];
  if (column.of_time) {
    const std::int64_t time = raw.times[row * artefact.times.size() + column.reads[0]];
    if (time == MISSING) return 0;
    const auto left = remainder(time, static_cast<std::int64_t>(period));
    return circle(static_cast<double>(left) / period, cosine);
  }
  const float number = raw.numbers[row * artefact.dense.size() + column.reads[0]];
  if (std::isnan(number)) return 0;
  double left = std::fmod(static_cast<double>(number), period);
  if (left < 0) left += period;
  return circle(left / period, cosine);
}

// Replace ids by their places in a vocabulary, counted from 1; others are missing.
void place(const Derived& column, Ids& of) {
  const std::int64_t* end = column.known + column.count;
  for (std::int64_t& id : of.ids) {
    const std::int64_t* found = std::lower_bound(column.known, end, id);
    id = found != end && *found == id ? found - column.known + 1 : MISSING;
  }
}

}  // namespace

void derive(const Artefact& artefact, const Raw& values, Rows& rows) {
  const std::vector<float>& numbers = values.numbers;
  const auto count = static_cast<std::size_t>(rows.count);
  const std::size_t raw = artefact.dense.size();
  std::vector<float> dense(count * artefact.numbers);
  for (std::size_t row = 0; row < count; ++row) {
    float* of_row = dense.data() + row * artefact.numbers;
    const std::size_t wide = artefact.vector_numbers;
    std::copy_n(rows.dense.data() + row * raw, raw, of_row);
    std::copy_n(values.vectors.data() + row * wide, wide, of_row + artefact.numbers - wide);
  }
  rows.sparse.resize(artefact.features.size());
  for (const Derived& column : artefact.derived) {
    switch (column.kind) {
      case DerivedKind::buckets:
        rows.sparse[column.makes] = bucket_ids(artefact, column, numbers, rows.count);
        break;
      case DerivedKind::missing:
        for (std::size_t row = 0; row < count; ++row) {
          const bool missing = std::isnan(numbers[row * raw + column.reads[0]]);
          dense[row * artefact.numbers + column.makes] = missing ? 1.0F : 0.0F;
        }
        break;
      case DerivedKind::piecewise:
        for (std::size_t row = 0; row < count; ++row) {
          dense[row * artefact.numbers + column.makes] =
              way_gone(column, numbers[row * raw + column.reads[0]]);
        }
        break;
      case DerivedKind::cross:
        rows.sparse[column.makes] = crossed(artefact, column, rows);
        break;
      case DerivedKind::hour:
      case DerivedKind::weekday:
        rows.sparse[column.makes] = dates(artefact, column, values, rows.count);
        break;
      case DerivedKind::sine:
      case DerivedKind::cosine:
        for (std::size_t row = 0; row < count; ++row) {
          dense[row * artefact.numbers + column.makes] = on_circle(artefact, column, values, row);
        }
        break;
      case DerivedKind::vocabulary: place(column, rows.sparse[column.makes]); break;
    }
  }
  rows.dense = std::move(dense);
}

}  // namespace recapp

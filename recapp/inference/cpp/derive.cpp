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
  const float way = (number - column.edges[0]) / (column.edges[1] - column.edges[0]);
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

// Replace ids by their places in a vocabulary, counted from 1; others are missing.
void place(const Derived& column, Ids& of) {
  const std::int64_t* end = column.known + column.count;
  for (std::int64_t& id : of.ids) {
    const std::int64_t* found = std::lower_bound(column.known, end, id);
    id = found != end && *found == id ? found - column.known + 1 : MISSING;
  }
}

}  // namespace

void derive(const Artefact& artefact, const std::vector<float>& numbers, Rows& rows) {
  const auto count = static_cast<std::size_t>(rows.count);
  const std::size_t raw = artefact.dense.size();
  std::vector<float> dense(count * artefact.numbers);
  for (std::size_t row = 0; row < count; ++row) {
    std::copy_n(rows.dense.data() + row * raw, raw, dense.data() + row * artefact.numbers);
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
      case DerivedKind::vocabulary: place(column, rows.sparse[column.makes]); break;
    }
  }
  rows.dense = std::move(dense);
}

}  // namespace recapp

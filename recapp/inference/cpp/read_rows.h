// Rows of the input: JSON lines, or Arrow IPC where the program was built with it.
#pragma once

#include <string>
#include <string_view>

#include "derive.h"

namespace recapp {

// Collects the values of a batch, feature by feature.
class RowsBuilder {
 public:
  explicit RowsBuilder(const Artefact& artefact);

  // Return the name of a feature: dense ones have the first numbers, then sparse ones, times and
  // vectors.
  const std::string& name(int feature) const;
  int features() const {
    return times() + static_cast<int>(artefact_.times.size() + artefact_.vectors.size());
  }
  bool is_dense(int feature) const {
    return feature < static_cast<int>(artefact_.dense.size());
  }
  bool is_time(int feature) const { return feature >= times() && !is_vector(feature); }
  bool is_vector(int feature) const {
    return feature >= times() + static_cast<int>(artefact_.times.size());
  }

  // Make room for more rows, whose values may come in any order of features.
  void add_rows(std::int64_t count);
  void add_number(int feature, std::int64_t row, const Value& value);
  // Add a time; `ticks` of the value's own unit, or 0 for that of the feature.
  void add_time(int feature, std::int64_t row, const Value& value, std::int64_t ticks = 0);
  // Check the length of a vector, whose numbers come one by one; without any it is zeros.
  void check_length(int feature, std::int64_t length) const;
  void add_to_vector(int feature, std::int64_t row, std::int64_t place, const Value& value);
  // Values of a sparse feature come row by row: one id, or text of several; or a list, which begins
  // with `begin_list`.
  void add_id(int feature, const Value& value);
  void begin_list(int feature) { ids(feature).lists = true; }
  void add_to_list(int feature, const Value& value);
  void end_row(int feature) { ids(feature).ends.push_back(size(feature)); }

  // Return all rows. A missing value of a feature with bags is an empty bag.
  Rows finish();

 private:
  std::size_t sparse(int feature) const { return feature - artefact_.dense.size(); }
  void add_one(int feature, const Value& value);
  // Whether an id of a list is left out: a missing one, or one that fills it up to a length.
  bool is_absent(std::size_t sparse, std::int64_t id) const;
  Ids& ids(int feature) { return rows_.sparse[feature - artefact_.dense.size()]; }
  // Return the number of the first time.
  int times() const { return static_cast<int>(artefact_.dense.size() + artefact_.sparse.size()); }
  const VectorColumn& vector(int feature) const {
    return artefact_.vectors[feature - times() - artefact_.times.size()];
  }
  std::int64_t size(int feature) { return static_cast<std::int64_t>(ids(feature).ids.size()); }

  const Artefact& artefact_;
  Rows rows_;
  Raw raw_;  // numbers only where columns are derived
};

// Return the rows of JSON lines; `source` is what messages call it.
Rows read_json(std::string_view text, const Artefact& artefact, const std::string& source);

// Return rows that are JSON objects.
Rows read_rows(const std::vector<Json>& objects, const Artefact& artefact,
               const std::string& source);

// Whether bytes begin as a stream or file of Arrow does.
bool looks_like_arrow(std::string_view bytes);
// Whether the program was built with Arrow.
bool has_arrow();
// Return the rows of a stream or file of Arrow. Columns that are no features are left out.
Rows read_arrow(std::string_view bytes, const Artefact& artefact, const std::string& source);

}  // namespace recapp

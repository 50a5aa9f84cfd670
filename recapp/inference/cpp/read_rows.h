// Rows of the input: JSON lines, or Arrow IPC where the program was built with it.
#pragma once

#include <string>
#include <string_view>

#include "decode.h"

namespace recapp {

// Collects the values of a batch, feature by feature.
class RowsBuilder {
 public:
  explicit RowsBuilder(const Artefact& artefact);

  // Return the name of a feature; dense ones are numbered first, then sparse ones.
  const std::string& name(int feature) const;
  int features() const { return static_cast<int>(artefact_.dense.size() + artefact_.sparse.size()); }
  bool is_dense(int feature) const {
    return feature < static_cast<int>(artefact_.dense.size());
  }

  // Make room for more rows, whose values may come in any order of features.
  void add_rows(std::int64_t count);
  void add_number(int feature, std::int64_t row, const Value& value);
  // Values of a sparse feature come row by row. A list begins with `begin_list`.
  void add_id(int feature, const Value& value);
  void begin_list(int feature) { ids(feature).lists = true; }
  void add_to_list(int feature, const Value& value);
  void end_row(int feature) { ids(feature).ends.push_back(size(feature)); }

  // Return all rows; ids that are missing in lists are none.
  Rows finish();

 private:
  Ids& ids(int feature) { return rows_.sparse[feature - artefact_.dense.size()]; }
  std::int64_t size(int feature) { return static_cast<std::int64_t>(ids(feature).ids.size()); }

  const Artefact& artefact_;
  Rows rows_;
  std::vector<float> numbers_;  // for derived columns: not transformed, NaN where missing
};

// Return the rows of JSON lines; `source` is what messages call it.
Rows read_json(std::string_view text, const Artefact& artefact, const std::string& source);

// Whether bytes begin as a stream or file of Arrow does.
bool looks_like_arrow(std::string_view bytes);
// Whether the program was built with Arrow.
bool has_arrow();
// Return the rows of a stream or file of Arrow. Columns that are no features are left out.
Rows read_arrow(std::string_view bytes, const Artefact& artefact, const std::string& source);

}  // namespace recapp

// Tables: ids become rows (recapp/tables/ids.py), and rows are found in mapped files.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "decode.h"

namespace recapp {

// The mapped files of all tables, each mapped once.
class MappedTables {
 public:
  // `verify`: whether the bytes of all rows are compared with their checksums.
  MappedTables(const Artefact& artefact, bool verify);

  // Return the first row of a table.
  const std::uint8_t* rows(std::size_t table) const { return rows_[table]; }
  // Return the ascending positions of a dynamic table's keys.
  const std::int64_t* positions(std::size_t table) const { return positions_[table]; }

 private:
  std::unordered_map<std::string, std::unique_ptr<MappedFile>> files_;
  std::vector<const std::uint8_t*> rows_;
  std::vector<const std::int64_t*> positions_;
};

// The rows that a lookup sums in a batch.
struct FoundRows {
  std::vector<const std::uint8_t*> rows;
  std::vector<std::int64_t> lengths;             // ids of each sample
  std::vector<std::vector<std::uint8_t>> start;  // rows of keys that have none
};

// Find the rows of `count` samples from `first` on. Throws Error where an id is outside of a table
// whose rule is `error`, or a bag has more ids than a concatenation takes.
FoundRows find_rows(const Artefact& artefact, const MappedTables& tables, const Lookup& lookup,
                    const Ids& ids, std::int64_t first, std::int64_t count);

}  // namespace recapp

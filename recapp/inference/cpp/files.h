// Files of an artefact: read whole, or mapped; their checksums.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "error.h"

namespace recapp {

// The bytes of a regular file, mapped read-only: pages are read when they are used, and all
// processes that map the file share them.
class MappedFile {
 public:
  // Errors say that `what` is missing or cannot be read.
  MappedFile(const std::string& path, const std::string& what);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::uint8_t* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::uint64_t size_ = 0;
};

// Return all that a file, a pipe or standard input ("-") holds.
std::string read_all(const std::string& path);

// CRC-32 as of zlib.
std::uint32_t crc32(std::string_view bytes);
std::string hex8(std::uint32_t value);

bool is_folder(const std::string& path);

}  // namespace recapp

#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace recapp {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

Tables crc_tables() {
  Tables made{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t c = n;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320U ^ (c >> 1) : c >> 1;
    made[0][n] = c;
  }
  for (std::size_t t = 1; t < 8; ++t) {
    for (std::size_t n = 0; n < 256; ++n) {
      made[t][n] = made[0][made[t - 1][n] & 255] ^ (made[t - 1][n] >> 8);
    }
  }
  return made;
}

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& what) {
  // a pipe would wait for a writer
  const int handle = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (handle < 0) {
    throw Error(what + (errno == ENOENT ? " is missing"
                                        : std::string(" cannot be read: ") + std::strerror(errno)));
  }
  struct stat found {};
  if (::fstat(handle, &found) != 0 || !S_ISREG(found.st_mode)) {
    ::close(handle);
    throw Error(what + " is no file");
  }
  size_ = static_cast<std::uint64_t>(found.st_size);
  void* mapped =
      size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, handle, 0) : nullptr;
  const int problem = errno;
  ::close(handle);
  if (mapped == MAP_FAILED) throw Error(what + " cannot be mapped: " + std::strerror(problem));
  data_ = static_cast<const std::uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

std::string read_all(const std::string& path) {
  const int handle = path == "-" ? 0 : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (handle < 0) throw Error(path + " cannot be read: " + std::strerror(errno));
  std::string made;
  std::size_t filled = 0;
  while (true) {
    if (made.size() - filled < 1 << 16) made.resize(made.size() * 2 + (1 << 20));
    const ssize_t got = ::read(handle, made.data() + filled, made.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int problem = errno;
      if (handle) ::close(handle);
      throw Error((handle ? path : "standard input") + " cannot be read: " +
                  std::strerror(problem));
    }
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
  }
  if (handle) ::close(handle);
  made.resize(filled);
  return made;
}

std::uint32_t crc32(std::string_view bytes) {
  static const Tables t = crc_tables();
  const auto* at = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::size_t left = bytes.size();
  std::uint32_t crc = 0xFFFFFFFFU;
  for (; left >= 8; left -= 8, at += 8) {
    const std::uint32_t low = crc ^ (at[0] | at[1] << 8 | at[2] << 16 | std::uint32_t{at[3]} << 24);
    crc = t[7][low & 255] ^ t[6][(low >> 8) & 255] ^ t[5][(low >> 16) & 255] ^ t[4][low >> 24] ^
          t[3][at[4]] ^ t[2][at[5]] ^ t[1][at[6]] ^ t[0][at[7]];
  }
  for (; left; --left, ++at) crc = t[0][(crc ^ *at) & 255] ^ (crc >> 8);
  return ~crc;
}

std::string hex8(std::uint32_t value) {
  char made[9];
  std::snprintf(made, sizeof made, "%08x", value);
  return made;
}

bool is_folder(const std::string& path) {
  struct stat found {};
  return ::stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

}  // namespace recapp

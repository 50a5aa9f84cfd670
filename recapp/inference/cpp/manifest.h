// An artefact's manifest, read and checked: nothing in it is trusted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"

namespace recapp {

enum class Storage { fp64, fp32, fp16, bf16, int8, int4 };
enum class Rule { error, hash, clamp, drop, dynamic };
enum class Pooling { sum, mean, concat, none };
enum class TextIds { hex, hashed, integers };
enum class Transform { none, log1p, log3 };
enum class DerivedKind {
  buckets, missing, piecewise, cross, vocabulary, hour, weekday, sine, cosine
};

struct Table {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  Storage storage = Storage::fp32;
  std::string file;
  std::int64_t first_row = 0;
  std::string keys;  // empty where rows have numbers
  Rule rule = Rule::error;
  std::int64_t min_key = 0;
  std::uint32_t start_hash = 0;
  double start_range = 0;
};

struct Lookup {
  std::size_t table = 0;
  std::size_t feature = 0;  // among the sparse ones
  std::string output;
  Pooling pooling = Pooling::sum;
  std::int64_t hotness = 1;  // vectors side by side
  bool truncates = false;
};

// What the dense part gets of a collection: one matrix of all its lookups, or for each of them its
// vectors and the lengths of its bags.
struct Input {
  std::size_t first = 0;  // lookup
  std::size_t lookups = 0;
  bool pooled = true;
  bool fp64 = false;  // whether it is computed in 64 bits
};

// An output of the dense part, and the column of scores that it becomes.
struct Output {
  std::string name = "logit";
  std::string column = "score";
  bool sigmoid = true;          // else a score is the output as it is
  std::vector<double> example;  // the outputs of the example
};

// A column that is computed from others (recapp/dataset/data_settings.py).
struct Derived {
  DerivedKind kind = DerivedKind::buckets;
  std::vector<std::size_t> reads;  // features with ids of cross and vocabulary, else dense ones
  bool of_time = false;            // whether it reads a time instead
  std::size_t makes = 0;           // the feature with ids, or the number
  std::uint64_t first = 0;         // of its values in the file
  std::uint64_t count = 0;
  std::vector<float> edges;               // of buckets, the ends of a piece, a period; ascending
  const std::int64_t* known = nullptr;    // ids of a vocabulary, ascending
};

// A column of times, in whole numbers of ticks, of which a second has so many.
struct TimeColumn {
  std::string name;
  std::int64_t ticks = 1;
};

// A column of vectors of one length.
struct VectorColumn {
  std::string name;
  std::size_t width = 0;
  std::size_t first = 0;  // among the numbers of all vectors
};

struct Compiled {
  std::string file;
  std::string torch;
  std::string machine;
  std::vector<std::string> flags;
};

struct FileEntry {
  std::uint64_t bytes = 0;
  std::string crc32;
};

struct Artefact {
  std::string folder;
  std::string name;
  std::string version;  // the CRC-32 of the manifest
  std::vector<Table> tables;
  std::vector<Lookup> lookups;
  std::vector<Input> inputs;
  std::vector<std::string> dense;
  std::vector<std::string> sparse;
  std::vector<TextIds> text;  // of each sparse feature
  // whether each sparse feature had bags in training; empty where the artefact does not say it
  std::vector<bool> lists;
  // of each sparse feature: the id that fills its lists up to a length, INT64_MIN if none does
  std::vector<std::int64_t> padding;
  std::vector<std::string> separators;  // of the ids of a text, empty where a text is one id
  std::vector<TimeColumn> times;
  std::vector<VectorColumn> vectors;
  std::size_t vector_numbers = 0;     // of all vectors of a row
  std::vector<std::string> features;  // with ids: sparse ones, then derived ones
  std::size_t numbers = 0;            // of the dense part: dense features, derived ones, vectors
  std::vector<Derived> derived;
  std::shared_ptr<MappedFile> derived_values;
  Transform transform = Transform::none;
  std::map<std::string, FileEntry> files;
  std::vector<Output> outputs;
  std::vector<Json> example;  // a few rows, whose outputs are known
  Compiled compiled;

  std::string path(const std::string& file) const { return folder + "/" + file; }
  // Map a file whose size must be that of the manifest.
  MappedFile map(const std::string& file) const;
  // Compare the bytes of a file with its checksum.
  void verify(const std::string& file, const MappedFile& found) const;
  [[noreturn]] void damaged(const std::string& why) const;
};

// Read a manifest, and check that its files are there in full.
Artefact read_artefact(const std::string& path);

// Return the bytes of a stored row.
std::int64_t row_bytes(Storage storage, std::int64_t dim);
const char* name_of(Storage storage);

}  // namespace recapp

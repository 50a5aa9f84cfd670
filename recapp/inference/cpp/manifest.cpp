#include "manifest.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace recapp {
namespace {

constexpr std::int64_t LARGEST = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t MOST_COLUMNS = 1 << 24;
constexpr std::uint64_t MOST_BYTES = 1 << 28;
constexpr const char* DERIVED_FILE = "derived.bin";
const char* const STORAGES[] = {"fp64", "fp32", "fp16", "bf16", "int8", "int4"};

using Kind = Json::Kind;

// What is wrong with an entry; read_artefact makes an error of the artefact of it.
struct Damage : Error {
  using Error::Error;
};

const Json& entry(const Json& of, const char* key) {
  const Json* found = of.find(key);
  if (!found) throw Damage(std::string(key) + " is missing");
  return *found;
}

const Json& entry(const Json& of, const char* key, Kind kind) {
  const Json& found = entry(of, key);
  if (!found.is(kind)) throw Damage(std::string(key) + " is of another type");
  return found;
}

const std::string& text(const Json& of, const char* key) {
  return entry(of, key, Kind::text).text;
}

std::int64_t integer(const Json& of, const char* key, std::int64_t least, std::int64_t most) {
  const std::int64_t found = entry(of, key, Kind::integer).integer;
  if (found < least || found > most) throw Damage(std::string(key) + "=" + std::to_string(found));
  return found;
}

double number(const Json& value, const char* what) {
  const double found = value.is(Kind::number)    ? value.number
                       : value.is(Kind::integer) ? static_cast<double>(value.integer)
                                                 : NAN;
  if (!std::isfinite(found)) throw Damage(std::string(what) + " is no number");
  return found;
}

std::vector<std::string> texts(const Json& of, const char* key) {
  std::vector<std::string> made;
  for (const Json& item : entry(of, key, Kind::array).items) {
    if (!item.is(Kind::text)) throw Damage(std::string(key) + " is no list of names");
    made.push_back(item.text);
  }
  return made;
}

// Return the number of a name among those that are allowed.
template <typename T, std::size_t N>
T one_of(const std::string& name, const char* const (&names)[N], const char* what) {
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<T>(i);
  }
  throw Damage(std::string(what) + "=" + shown(name));
}

std::size_t index_of(const std::vector<std::string>& names, const std::string& name,
                     const char* what) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) throw Damage(std::string(what) + " " + shown(name) + " is unknown");
  return static_cast<std::size_t>(found - names.begin());
}

void check_names(const std::vector<std::string>& names) {
  auto sorted = names;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) throw Damage("name " + shown(*twice) + " occurs twice");
}

// Return the path of a file, which does not lead out of the directory.
std::string inside(const std::string& file) {
  bool good = !file.empty() && file[0] != '/';
  for (const unsigned char c : file) good = good && c >= 32 && c != 127;
  for (std::size_t at = 0; at <= file.size();) {
    const std::size_t end = std::min(file.find('/', at), file.size());
    good = good && file.substr(at, end - at) != "..";
    at = end + 1;
  }
  if (!good) throw Damage("file " + shown(file));
  return file;
}

std::map<std::string, FileEntry> read_files(const Json& files) {
  std::map<std::string, FileEntry> made;
  for (std::size_t i = 0; i < files.items.size(); ++i) {
    FileEntry& entry = made[inside(files.keys[i])];
    entry.bytes = static_cast<std::uint64_t>(integer(files.items[i], "bytes", 0, LARGEST));
    entry.crc32 = text(files.items[i], "crc32");
  }
  return made;
}

Table read_table(const Json& of) {
  static const char* const rules[] = {"error", "hash", "clamp", "drop"};
  Table t;
  t.name = text(of, "name");
  t.rows = integer(of, "rows", 0, LARGEST);
  t.dim = integer(of, "dim", 1, MOST_COLUMNS);
  t.storage = one_of<Storage>(text(of, "storage"), STORAGES, "storage");
  t.file = text(of, "file");
  t.first_row = integer(of, "first_row", 0, LARGEST - t.rows);
  t.rule = one_of<Rule>(text(of, "id_rule"), rules, "id_rule");
  t.min_key = integer(of, "min_key", -LARGEST, LARGEST - t.rows);
  t.start_hash = static_cast<std::uint32_t>(integer(of, "start_hash", 0, 0xFFFFFFFFLL));
  t.start_range = number(entry(of, "start_range"), "start_range");
  if (!entry(of, "keys").is(Kind::null)) {
    t.keys = text(of, "keys");
    t.rule = Rule::dynamic;
    if (t.keys.empty()) throw Damage("table " + shown(t.name) + ": keys=''");
  } else if (t.rows < (t.rule == Rule::hash ? 2 : 1)) {
    throw Damage("table " + shown(t.name) + " has too few rows");
  }
  if (t.min_key && (t.rule == Rule::hash || t.rule == Rule::dynamic)) {
    throw Damage("table " + shown(t.name) + ": min_key with any id");
  }
  return t;
}

// Check that a table's rows and keys are inside of their files.
void check_files(const Artefact& artefact, const Table& t) {
  const auto held = [&](const std::string& file) -> unsigned __int128 {
    const auto found = artefact.files.find(file);
    if (found == artefact.files.end()) throw Damage("file " + shown(file) + " is not listed");
    return found->second.bytes;
  };
  const auto width = static_cast<unsigned __int128>(row_bytes(t.storage, t.dim));
  const unsigned __int128 end = static_cast<std::uint64_t>(t.first_row + t.rows);
  if (held(t.file) % width || held(t.file) < end * width) {
    throw Damage("table " + shown(t.name) + " has rows that " + t.file + " has not");
  }
  if (t.rule == Rule::dynamic && held(t.keys) < end * 8) {
    throw Damage("table " + shown(t.name) + " has keys that " + t.keys + " has not");
  }
}

Lookup read_lookup(const Json& of, const Artefact& artefact) {
  static const char* const poolings[] = {"sum", "mean", "concat", "none"};
  Lookup x;
  std::vector<std::string> tables;
  for (const Table& t : artefact.tables) tables.push_back(t.name);
  x.table = index_of(tables, text(of, "table"), "table");
  x.feature = index_of(artefact.features, text(of, "feature"), "feature");
  x.output = text(of, "output");
  x.pooling = one_of<Pooling>(text(of, "pooling"), poolings, "pooling");
  x.truncates = entry(of, "truncates", Kind::boolean).flag;
  if (x.pooling == Pooling::concat) x.hotness = integer(of, "hotness", 1, MOST_COLUMNS);
  return x;
}

// Return what the dense part gets of each collection: its lookups follow each other.
std::vector<Input> read_inputs(const Json& compiled, const Artefact& artefact) {
  std::vector<Input> made;
  std::size_t end = 0;
  const bool fp64 = text(compiled, "dtype") == "float64";
  for (const Json& of : entry(compiled, "inputs", Kind::array).items) {
    Input input;
    input.first = end;
    input.pooled = entry(of, "pooled", Kind::boolean).flag;
    const auto outputs = texts(of, "outputs");
    const auto& columns = entry(of, "columns", Kind::array).items;
    input.lookups = outputs.size();
    end += outputs.size();
    if (outputs.empty() || end > artefact.lookups.size() || columns.size() != outputs.size()) {
      throw Damage("compiled: inputs do not fit lookups");
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Lookup& x = artefact.lookups[input.first + i];
      const Table& t = artefact.tables[x.table];
      input.fp64 = input.fp64 || t.storage == Storage::fp64;
      if (x.output != outputs[i] || (x.pooling == Pooling::none) == input.pooled ||
          !columns[i].is(Kind::integer) || columns[i].integer != t.dim * x.hotness) {
        throw Damage("compiled: input " + shown(outputs[i]) + " does not fit its lookup");
      }
    }
    if (input.fp64 != fp64) throw Damage("compiled: dtype is not that of the tables");
    made.push_back(input);
  }
  if (end != artefact.lookups.size()) throw Damage("compiled: inputs do not fit lookups");
  return made;
}

// Read the columns that are computed from others; their values are in a file.
void read_derived(const Json& columns, Artefact& artefact) {
  static const char* const kinds[] = {"buckets",    "missing", "piecewise", "cross",
                                      "vocabulary", "hour",    "weekday",   "sine",
                                      "cosine"};
  using enum DerivedKind;
  if (!columns.is(Kind::array)) throw Damage("derived is of another type");
  std::vector<std::string> names = artefact.dense;
  names.insert(names.end(), artefact.sparse.begin(), artefact.sparse.end());
  std::vector<std::string> times;
  for (const TimeColumn& time : artefact.times) times.push_back(time.name);
  for (const Json& of : columns.items) {
    Derived made;
    made.kind = one_of<DerivedKind>(text(of, "kind"), kinds, "kind");
    made.first = static_cast<std::uint64_t>(integer(of, "first", 0, LARGEST));
    made.count = static_cast<std::uint64_t>(integer(of, "count", 0, LARGEST));
    const bool round = made.kind == sine || made.kind == cosine;
    const bool number = round || made.kind == missing || made.kind == piecewise;
    const bool of_numbers = number || made.kind == buckets;
    if (made.kind == piecewise && made.count != 0 && made.count != 2) {
      throw Damage("derived: count of a piece");
    }
    if (round && made.count != 1) throw Damage("derived: count of periods");
    for (const std::string& name : texts(of, "reads")) {
      made.of_time = made.kind == hour || made.kind == weekday ||
                     (round && std::find(times.begin(), times.end(), name) != times.end());
      const auto& among = made.of_time ? times : of_numbers ? artefact.dense : artefact.features;
      made.reads.push_back(index_of(among, name, "column"));
    }
    const bool cross = made.kind == DerivedKind::cross;
    // a vocabulary counts the ids of all features of a table, and one of them gets its places
    const bool several = cross || made.kind == vocabulary;
    const std::size_t most = cross ? 3 : several ? artefact.features.size() : 1;
    if (made.reads.size() < (cross ? 2 : 1) || made.reads.size() > most) {
      throw Damage("derived: reads");
    }
    const std::string& name = text(of, "name");
    if (made.kind == vocabulary) {
      made.makes = index_of(artefact.features, name, "feature");
    } else {
      names.push_back(name);
      made.makes = number ? artefact.numbers++ : artefact.features.size();
      if (!number) artefact.features.push_back(name);
    }
    artefact.derived.push_back(std::move(made));
  }
  check_names(names);
}

// Map the values of derived columns, and check them.
void map_derived(Artefact& artefact) {
  if (artefact.derived.empty()) return;
  const auto listed = artefact.files.find(DERIVED_FILE);
  if (listed == artefact.files.end()) artefact.damaged(std::string(DERIVED_FILE) + " is not listed");
  artefact.derived_values = std::make_shared<MappedFile>(
      artefact.path(DERIVED_FILE),
      artefact.folder + " is an incomplete artefact: " + DERIVED_FILE);
  artefact.verify(DERIVED_FILE, *artefact.derived_values);
  const std::uint64_t values = artefact.derived_values->size() / 8;
  for (Derived& column : artefact.derived) {
    if (column.first > values || column.count > values - column.first) {
      artefact.damaged("derived: values outside of " + std::string(DERIVED_FILE));
    }
    const std::uint8_t* at = artefact.derived_values->data() + 8 * column.first;
    bool ascends = true;
    using enum DerivedKind;
    const bool round = column.kind == sine || column.kind == cosine;
    if (round || column.kind == buckets || column.kind == piecewise) {
      const double* edges = reinterpret_cast<const double*>(at);
      column.edges.assign(edges, edges + column.count);
      for (std::size_t i = 1; i < column.edges.size(); ++i) {
        ascends = ascends && column.edges[i - 1] < column.edges[i];
      }
      const double least = column.of_time ? 1 : 0;
      if (round && !(column.edges[0] >= least && column.edges[0] > 0 && column.edges[0] < 1e31)) {
        artefact.damaged("derived: a period");
      }
    } else if (column.kind == vocabulary) {
      column.known = reinterpret_cast<const std::int64_t*>(at);
      for (std::uint64_t i = 1; i < column.count; ++i) {
        ascends = ascends && column.known[i - 1] < column.known[i];
      }
    }
    if (!ascends) artefact.damaged("derived: values that do not ascend");
  }
}

// Read what lists of ids are filled up with, and what stands between the ids of a text.
void read_lists(const Json& of, Artefact& artefact) {
  if (of.find("id_weights")) {
    throw Error("artefact " + artefact.folder + " has weights of ids (dataset.id_weights), by which "
                "only Python multiplies: recapp.predict, recapp.serve or load_model");
  }
  artefact.padding.assign(artefact.sparse.size(), std::numeric_limits<std::int64_t>::min());
  artefact.separators.resize(artefact.sparse.size());
  if (const Json* padding = of.find("padding")) {
    if (!padding->is(Kind::array)) throw Damage("padding is of another type");
    for (const Json& item : padding->items) {
      const std::size_t at = index_of(artefact.sparse, text(item, "name"), "padding");
      artefact.padding[at] = integer(item, "id", -LARGEST, LARGEST);
    }
  }
  if (const Json* separator = of.find("separator")) {
    if (!separator->is(Kind::array)) throw Damage("separator is of another type");
    for (const Json& item : separator->items) {
      const std::size_t at = index_of(artefact.sparse, text(item, "name"), "separator");
      artefact.separators[at] = text(item, "text");
      if (artefact.separators[at].empty()) throw Damage("separator=''");
    }
  }
}

// Read the columns of times and of vectors, if there are any.
void read_further(const Json& of, Artefact& artefact) {
  static const char* const units[] = {"s", "ms", "us", "ns"};
  static const std::int64_t ticks[] = {1, 1000, 1000000, 1000000000};
  if (const Json* times = of.find("times")) {
    if (!times->is(Kind::array)) throw Damage("times is of another type");
    for (const Json& item : times->items) {
      const int unit = one_of<int>(text(item, "unit"), units, "unit");
      artefact.times.push_back({text(item, "name"), ticks[unit]});
    }
  }
  if (const Json* vectors = of.find("vectors")) {
    if (!vectors->is(Kind::array)) throw Damage("vectors is of another type");
    for (const Json& item : vectors->items) {
      const auto width = static_cast<std::size_t>(integer(item, "width", 1, MOST_COLUMNS));
      artefact.vectors.push_back({text(item, "name"), width, artefact.vector_numbers});
      artefact.vector_numbers += width;
    }
  }
}

void read_features(const Json& of, Artefact& artefact) {
  static const char* const ways[] = {"hex", "hashed", "integers"};
  static const char* const transforms[] = {"none", "log1p", "log3"};
  artefact.dense = texts(of, "dense");
  artefact.sparse = texts(of, "sparse");
  auto all = artefact.dense;
  all.insert(all.end(), artefact.sparse.begin(), artefact.sparse.end());
  read_further(of, artefact);
  for (const TimeColumn& time : artefact.times) all.push_back(time.name);
  for (const VectorColumn& vector : artefact.vectors) all.push_back(vector.name);
  check_names(all);
  const Json& way = entry(of, "text", Kind::object);
  for (const std::string& name : artefact.sparse) {
    artefact.text.push_back(one_of<TextIds>(text(way, name.c_str()), ways, "text"));
  }
  if (of.find("lists")) {
    artefact.lists.resize(artefact.sparse.size(), false);
    for (const std::string& name : texts(of, "lists")) {
      artefact.lists[index_of(artefact.sparse, name, "lists")] = true;
    }
  }
  read_lists(of, artefact);
  artefact.transform = one_of<Transform>(text(of, "transform"), transforms, "transform");
  artefact.features = artefact.sparse;
  artefact.numbers = artefact.dense.size();
  if (const Json* columns = of.find("derived")) read_derived(*columns, artefact);
  artefact.numbers += artefact.vector_numbers;
}

std::vector<double> numbers(const Json& values, const char* what) {
  if (!values.is(Kind::array)) throw Damage(std::string(what) + " is of another type");
  std::vector<double> made;
  for (const Json& value : values.items) made.push_back(number(value, what));
  return made;
}

// Return the outputs in the order of the dense part.
std::vector<Output> read_outputs(const Json& info, const Json& compiled) {
  static const char* const activations[] = {"identity", "sigmoid"};
  const Json& example = entry(info, "outputs", Kind::object);
  std::map<std::string, Output> known;
  for (const Json& of : entry(info, "columns", Kind::array).items) {
    Output& output = known[text(of, "output")];
    output.name = text(of, "output");
    output.column = text(of, "name");
    output.sigmoid = one_of<int>(text(of, "activation"), activations, "activation") == 1;
    output.example = numbers(entry(example, output.name.c_str()), "outputs");
  }
  std::vector<Output> made;
  std::vector<std::string> columns;
  for (const std::string& name : texts(compiled, "outputs")) {
    const auto found = known.find(name);
    if (found == known.end()) throw Damage("compiled: output " + shown(name) + " has no column");
    made.push_back(found->second);
    columns.push_back(found->second.column);
    if (made.back().example.size() != made.front().example.size()) {
      throw Damage("outputs are of different length");
    }
  }
  if (made.empty()) throw Damage("compiled: it has no outputs");
  check_names(columns);
  return made;
}

void read_compiled(const Json& info, Artefact& artefact) {
  const Json& of = entry(info, "compiled");
  if (of.is(Kind::null)) {
    throw Error("artefact " + artefact.folder +
                " has no compiled dense part: export with compile=true");
  }
  artefact.compiled = {text(of, "file"), text(of, "torch"), text(of, "machine"),
                       texts(of, "flags")};
  if (!artefact.files.count(artefact.compiled.file)) throw Damage("compiled: file is not listed");
  if (integer(of, "dense", 0, LARGEST) != static_cast<std::int64_t>(artefact.numbers)) {
    throw Damage("compiled: it takes other dense features");
  }
  artefact.inputs = read_inputs(of, artefact);
  artefact.outputs = read_outputs(info, of);
  artefact.example = entry(info, "example", Kind::array).items;
}

void check_seal(std::string_view raw) {
  constexpr std::size_t foot = sizeof(",\n\"checksum\": \"00000000\"\n}\n") - 1;
  const bool sealed =
      raw.size() > foot && raw.substr(raw.size() - foot) ==
                               ",\n\"checksum\": \"" + hex8(crc32(raw.substr(0, raw.size() - foot))) +
                                   "\"\n}\n";
  if (!sealed) throw Damage("its bytes are not those that were written");
}

void check_format(const Json& info, const std::string& folder) {
  if (!info.is(Kind::object)) throw Damage("it is no JSON object");
  const std::string& format = text(info, "format");
  if (format == "recapp") {
    throw Error(folder + " is a checkpoint: `python -m recapp.export ckpt_path=" + folder +
                " output=DIR` makes an artefact of it");
  }
  if (format != "recapp-artefact") throw Damage("format " + shown(format));
  const std::int64_t version = integer(info, "version", 1, LARGEST);
  if (version > 4) {
    throw Error("artefact " + folder + " has version " + std::to_string(version) +
                ", but this program reads version 4: use a later recapp, or export the checkpoint "
                "with this one");
  }
}

void read_all_entries(const Json& info, Artefact& artefact) {
  artefact.name = text(info, "name");
  artefact.files = read_files(entry(info, "files", Kind::object));
  for (const Json& of : entry(info, "tables", Kind::array).items) {
    artefact.tables.push_back(read_table(of));
    check_files(artefact, artefact.tables.back());
  }
  std::vector<std::string> names;
  for (const Table& t : artefact.tables) names.push_back(t.name);
  check_names(names);
  read_features(entry(info, "features", Kind::object), artefact);
  for (const Json& of : entry(info, "lookups", Kind::array).items) {
    artefact.lookups.push_back(read_lookup(of, artefact));
  }
  const Json& ids = entry(info, "ids", Kind::object);
  if (text(ids, "text") != "xxh64") throw Damage("text ids are hashed by " + text(ids, "text"));
  read_compiled(info, artefact);
}

// The suffix of an earlier artefact between two renames, as in recapp/stored/store.py.
const char* const REPLACED = ".recapp-replaced";

// Return where an artefact is, also when its writer was killed between two renames.
std::string folder_of(const std::string& path) {
  std::string folder = path;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  struct stat found {};
  const bool there = ::stat(folder.c_str(), &found) == 0;
  if (!there && is_folder(folder + REPLACED)) return folder + REPLACED;
  if (!is_folder(folder)) {
    throw Error(path + ": there is no such directory: `recapp.export` writes artefacts");
  }
  return folder;
}

}  // namespace

MappedFile Artefact::map(const std::string& file) const {
  return MappedFile(path(file), folder + " is an incomplete artefact: " + file);
}

void Artefact::verify(const std::string& file, const MappedFile& found) const {
  if (hex8(crc32(found.text())) != files.at(file).crc32) {
    throw Error(path(file) +
                " is damaged: its bytes are not those that were exported; export it again");
  }
}

void Artefact::damaged(const std::string& why) const {
  throw Error("the manifest of artefact " + folder + " is damaged: " + why + "; export it again");
}

Artefact read_artefact(const std::string& path) {
  Artefact artefact;
  artefact.folder = folder_of(path);
  const MappedFile raw(artefact.path("manifest.json"),
                       artefact.folder + " is no artefact: manifest.json");
  try {
    if (raw.size() > MOST_BYTES) throw Damage("it is too large");
    const Json info = parse_json(raw.text());
    check_format(info, artefact.folder);
    check_seal(raw.text());
    artefact.version = hex8(crc32(raw.text()));
    read_all_entries(info, artefact);
  } catch (const JsonError& error) {
    artefact.damaged(error.what());
  } catch (const Damage& error) {
    artefact.damaged(error.what());
  }
  for (const auto& [file, entry] : artefact.files) {
    const MappedFile found = artefact.map(file);
    if (found.size() != entry.bytes) {
      throw Error("artefact " + artefact.folder + " is incomplete: " + file + " has " +
                  std::to_string(found.size()) + " of " + std::to_string(entry.bytes) + " bytes");
    }
  }
  map_derived(artefact);
  return artefact;
}

std::int64_t row_bytes(Storage storage, std::int64_t dim) {
  switch (storage) {
    case Storage::fp64: return dim * 8;
    case Storage::fp32: return dim * 4;
    case Storage::fp16:
    case Storage::bf16: return dim * 2;
    case Storage::int8: return (dim + 3) / 4 * 4 + 8;
    case Storage::int4: return (dim + 7) / 8 * 4 + 4;
  }
  return 0;
}

const char* name_of(Storage storage) { return STORAGES[static_cast<int>(storage)]; }

}  // namespace recapp

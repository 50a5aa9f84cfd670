#include "scorer.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "sum_rows.h"

namespace recapp {
namespace {

constexpr std::int64_t BAGS_OF_A_TASK = 256;
constexpr std::int64_t FEW_IDS = 4096;  // waking threads takes longer than looking up so many

std::vector<std::string> lacking(const std::vector<std::string>& flags) {
  std::ifstream file("/proc/cpuinfo");
  std::vector<std::string> have;
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 5, "flags") != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) have.push_back(word);
    break;
  }
  std::vector<std::string> made;
  for (const std::string& flag : flags) {
    if (std::find(have.begin(), have.end(), flag) == have.end()) made.push_back(flag);
  }
  return made;
}

// Some bags of a lookup, which one thread sums.
struct Task {
  std::size_t lookup;
  std::int64_t first;
  std::int64_t last;
  std::int64_t row;  // the first one of them in FoundRows
};

std::vector<Task> tasks_of(const std::vector<FoundRows>& found, std::int64_t count) {
  std::vector<Task> made;
  for (std::size_t i = 0; i < found.size(); ++i) {
    std::int64_t row = 0;
    for (std::int64_t first = 0; first < count; first += BAGS_OF_A_TASK) {
      const std::int64_t last = std::min(first + BAGS_OF_A_TASK, count);
      made.push_back({i, first, last, row});
      for (std::int64_t n = first; n < last; ++n) row += found[i].lengths[n];
    }
  }
  return made;
}

}  // namespace

void check_machine(const Artefact& artefact) {
  const Compiled& made = artefact.compiled;
  const std::string what = "the dense part of artefact " + artefact.folder;
  utsname here{};
  ::uname(&here);
  if (made.machine != here.machine) {
    throw Error(what + " is code for " + made.machine + ", and this machine is " + here.machine);
  }
  std::string names;
  for (const std::string& flag : lacking(made.flags)) names += (names.empty() ? "" : ", ") + flag;
  if (!names.empty()) throw Error(what + " needs " + names + ", which this CPU lacks");
  const std::string torch =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  if (made.torch != torch) {
    throw Error(what + " was made with torch " + made.torch +
                ", and this program was built with libtorch " + TORCH_VERSION);
  }
}

Scorer::Scorer(const Artefact& artefact, bool check_rows)
    : artefact_(artefact), tables_(artefact, check_rows) {
  for (const auto& [file, entry] : artefact.files) {
    if (file.compare(0, 5, "rows/") != 0) artefact.verify(file, artefact.map(file));
  }
  const std::string file = artefact.path(artefact.compiled.file);
  try {
    dense_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(file);
  } catch (const std::exception& error) {
    throw Error(file + " cannot be loaded: " + first_line(error.what()));
  }
}

std::vector<at::Tensor> Scorer::outputs(const Rows& rows, std::int64_t first,
                                        std::int64_t count) const {
  const c10::InferenceMode guard;
  const std::vector<FoundRows> found = find(rows, first, count);
  const Places places = place(found, count);
  const auto features = static_cast<std::int64_t>(artefact_.numbers);
  // a copy lies as memory of torch does
  std::vector<at::Tensor> inputs{
      at::from_blob(const_cast<float*>(rows.dense.data()) + first * features, {count, features})
          .clone()};
  inputs.insert(inputs.end(), places.inputs.begin(), places.inputs.end());
  const std::vector<at::Tensor> made = dense_->run(inputs);
  bool fits = made.size() == artefact_.outputs.size();
  for (const at::Tensor& values : made) fits = fits && values.numel() == count;
  if (!fits) {
    std::string names;
    for (const Output& output : artefact_.outputs) names += (names.empty() ? "" : ", ") + output.name;
    throw Error("the dense part of artefact " + artefact_.folder + " returns no " + names +
                " for each row");
  }
  return made;
}

std::vector<at::Tensor> Scorer::scores(const std::vector<at::Tensor>& outputs) const {
  std::vector<at::Tensor> made;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor values = outputs[i].to(at::kFloat);
    made.push_back(artefact_.outputs[i].sigmoid ? at::sigmoid(values) : values);
  }
  return made;
}

std::vector<FoundRows> Scorer::find(const Rows& rows, std::int64_t first,
                                    std::int64_t count) const {
  const auto lookups = static_cast<std::int64_t>(artefact_.lookups.size());
  std::vector<FoundRows> found(artefact_.lookups.size());
  std::vector<std::string> problem(artefact_.lookups.size());
  const std::int64_t grain = count * lookups < FEW_IDS ? lookups : 1;
  at::parallel_for(0, lookups, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const Lookup& x = artefact_.lookups[i];
      try {
        found[i] = find_rows(artefact_, tables_, x, rows.sparse[x.feature], first, count);
      } catch (const Error& error) {
        problem[i] = error.what();
      }
    }
  });
  for (const std::string& line : problem) {
    if (!line.empty()) throw Error(line);
  }
  return found;
}

Scorer::Places Scorer::place(const std::vector<FoundRows>& found, std::int64_t count) const {
  Places places;
  places.first.resize(found.size());
  places.stride.resize(found.size());
  std::int64_t numel = 0;
  std::vector<std::int64_t> begin(artefact_.inputs.size());
  for (std::size_t n = 0; n < artefact_.inputs.size(); ++n) {
    const Input& input = artefact_.inputs[n];
    std::int64_t columns = 0;
    begin[n] = numel;
    for (std::size_t i = input.first; i < input.first + input.lookups; ++i) {
      const Lookup& x = artefact_.lookups[i];
      const std::int64_t dim = artefact_.tables[x.table].dim;
      places.first[i] = numel + columns;
      columns += input.pooled ? dim * x.hotness : 0;
      if (!input.pooled) numel += static_cast<std::int64_t>(found[i].rows.size()) * dim;
    }
    for (std::size_t i = input.first; i < input.first + input.lookups; ++i) {
      places.stride[i] = columns;
    }
    numel += columns * count;
  }
  const bool fp64 = artefact_.inputs[0].fp64;
  const at::Tensor flat = at::empty({numel}, fp64 ? at::kDouble : at::kFloat);
  if (fp64) {
    sum(found, places, count, flat.data_ptr<double>());
  } else {
    sum(found, places, count, flat.data_ptr<float>());
  }
  for (std::size_t n = 0; n < artefact_.inputs.size(); ++n) {
    const Input& input = artefact_.inputs[n];
    if (input.pooled) {
      const std::int64_t columns = places.stride[input.first];
      places.inputs.push_back(flat.narrow(0, begin[n], count * columns).view({count, columns}));
      continue;
    }
    for (std::size_t i = input.first; i < input.first + input.lookups; ++i) {
      const std::int64_t dim = artefact_.tables[artefact_.lookups[i].table].dim;
      const auto ids = static_cast<std::int64_t>(found[i].rows.size());
      places.inputs.push_back(flat.narrow(0, places.first[i], ids * dim).view({ids, dim}));
      places.inputs.push_back(
          at::from_blob(const_cast<std::int64_t*>(found[i].lengths.data()), {count}, at::kLong)
              .clone());
    }
  }
  return places;
}

template <typename T>
void Scorer::sum(const std::vector<FoundRows>& found, const Places& places, std::int64_t count,
                 T* flat) const {
  const std::vector<Task> tasks = tasks_of(found, count);
  const auto all = static_cast<std::int64_t>(tasks.size());
  std::size_t ids = 0;
  for (const FoundRows& of : found) ids += of.rows.size();
  const std::int64_t grain = ids < FEW_IDS ? all : 1;
  at::parallel_for(0, all, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; ++at) {
      const Task& task = tasks[static_cast<std::size_t>(at)];
      const Lookup& x = artefact_.lookups[task.lookup];
      const Table& t = artefact_.tables[x.table];
      const FoundRows& of = found[task.lookup];
      const std::uint8_t* const* row = of.rows.data() + task.row;
      T* out = flat + places.first[task.lookup];
      if (x.pooling == Pooling::none) out += task.row * t.dim;
      for (std::int64_t n = task.first; n < task.last; ++n) {
        const std::int64_t length = of.lengths[static_cast<std::size_t>(n)];
        if (x.pooling == Pooling::none) {
          for (std::int64_t k = 0; k < length; ++k, out += t.dim) {
            sum_rows(t.storage, t.dim, row + k, 1, T{1}, out);
          }
        } else if (x.pooling == Pooling::concat) {
          T* here = out + n * places.stride[task.lookup];
          for (std::int64_t k = 0; k < x.hotness; ++k, here += t.dim) {
            sum_rows(t.storage, t.dim, row + k, k < length ? 1 : 0, T{1}, here);
          }
        } else {
          const T weight = x.pooling == Pooling::mean && length ? T{1} / static_cast<T>(length) : T{1};
          sum_rows(t.storage, t.dim, row, length, weight,
                   out + n * places.stride[task.lookup]);
        }
        row += length;
      }
    }
  });
}

}  // namespace recapp

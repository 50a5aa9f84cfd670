// Scores of raw rows by an artefact, without Python. Each step is a file of its own:
//
//   manifest    what the artefact is; checked, never trusted
//   read_rows   JSON lines (json) or Arrow IPC (read_arrow) -> decode -> ids and numbers
//   tables      ids -> rows of mapped files
//   sum_rows    rows -> vectors
//   scorer      vectors -> the compiled dense part -> outputs -> scores
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <sstream>

#include "options.h"
#include "read_rows.h"
#include "scorer.h"

namespace recapp {
namespace {

constexpr double TOLERANCE = 1e-4;  // as recapp/run/model.py has it

Rows read_input(const Options& options, const Artefact& artefact) {
  const std::string source = options.input == "-" ? "standard input" : options.input;
  const std::string bytes = read_all(options.input);
  const bool arrow =
      options.format == "arrow" || (options.format == "auto" && looks_like_arrow(bytes));
  Rows rows = arrow ? read_arrow(bytes, artefact, source) : read_json(bytes, artefact, source);
  if (!rows.count) throw Error(source + " has no rows");
  return rows;
}

// Compare the outputs of the example with those that it was exported with.
void check_example(const Artefact& artefact, const Scorer& scorer) {
  const Rows rows = read_rows(artefact.example, artefact, "the example of " + artefact.folder);
  const std::size_t wanted = artefact.outputs.front().example.size();
  if (rows.count != static_cast<std::int64_t>(wanted)) {
    artefact.damaged("its example has " + std::to_string(rows.count) + " rows, and " +
                     std::to_string(wanted) + " outputs");
  }
  if (!rows.count) return;
  const std::vector<at::Tensor> outputs = scorer.outputs(rows, 0, rows.count);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Output& output = artefact.outputs[i];
    const at::Tensor found = outputs[i].to(at::kDouble).contiguous();
    for (std::int64_t n = 0; n < rows.count; ++n) {
      const double expected = output.example[static_cast<std::size_t>(n)];
      const double own = found.data_ptr<double>()[n];
      if (std::fabs(own - expected) <= TOLERANCE * std::max(1.0, std::fabs(expected))) continue;
      char line[160];
      std::snprintf(line, sizeof line, " %.6f, must be %.6f", own, expected);
      throw Error("artefact " + artefact.folder +
                  " scores its example otherwise than it was exported: row " + std::to_string(n) +
                  " has the " + output.name + line +
                  ": its files do not belong together; export it again");
    }
  }
}

// Print a line of JSON for each row, with a value of each tensor. Names are JSON already.
void print(const std::vector<at::Tensor>& columns, const std::vector<std::string>& names) {
  std::vector<at::Tensor> own;
  for (const at::Tensor& values : columns) own.push_back(values.to(at::kDouble).contiguous());
  for (std::int64_t n = 0; n < own[0].numel(); ++n) {
    for (std::size_t i = 0; i < own.size(); ++i) {
      const double value = own[i].data_ptr<double>()[n];
      std::printf("%s%s: ", i ? ", " : "{", names[i].c_str());
      std::printf("%.*g", columns[i].scalar_type() == at::kDouble ? 17 : 9, value);
    }
    std::printf("}\n");
  }
}

// Refuse outputs that are not finite, as Python and servers do.
void check_finite(const std::vector<at::Tensor>& outputs, const Artefact& artefact,
                  std::int64_t first) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor odd = outputs[i].isfinite().logical_not().nonzero();
    if (!odd.numel()) continue;
    throw Error("row " + std::to_string(first + odd[0][0].item<std::int64_t>()) +
                ": the model gives a " + artefact.outputs[i].name + " that is no finite number");
  }
}

void score(const Options& options, const Artefact& artefact, const Rows& rows,
           const Scorer& scorer) {
  std::vector<std::string> names;
  for (const Output& output : artefact.outputs) {
    names.push_back(json_text(options.logits ? output.name : output.column));
  }
  for (std::int64_t first = 0; first < rows.count; first += options.batch) {
    const std::vector<at::Tensor> outputs =
        scorer.outputs(rows, first, std::min(options.batch, rows.count - first));
    const std::vector<at::Tensor> columns = options.logits ? outputs : scorer.scores(outputs);
    check_finite(outputs, artefact, first);
    check_finite(columns, artefact, first);  // a wide output may be infinite in 32 bits
    print(columns, names);
  }
  if (std::fflush(stdout) || std::ferror(stdout)) {
    throw Error("scores cannot be written to standard output");
  }
}

// Return rows `size` at least, those that there are one after the other again and again.
Rows repeated(const Rows& rows, std::int64_t size) {
  Rows made = rows;
  while (made.count < size) {
    made.count += rows.count;
    made.dense.insert(made.dense.end(), rows.dense.begin(), rows.dense.end());
    for (std::size_t f = 0; f < rows.sparse.size(); ++f) {
      Ids& into = made.sparse[f];
      const auto before = static_cast<std::int64_t>(into.ids.size());
      into.ids.insert(into.ids.end(), rows.sparse[f].ids.begin(), rows.sparse[f].ids.end());
      for (const std::int64_t end : rows.sparse[f].ends) into.ends.push_back(before + end);
    }
  }
  return made;
}

// Return how many microseconds each of `count` decoded batches takes: ids to scores. There are
// `batches` of them in the rows, which are taken in turn from the one of a number on.
std::vector<double> time_batches(const Rows& rows, const Scorer& scorer, std::int64_t size,
                                 std::int64_t batches, std::int64_t number, std::int64_t count) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> micros;
  for (std::int64_t i = number; i < number + count; ++i) {
    const std::int64_t first = i % batches * size;
    const auto begin = Clock::now();
    const std::vector<at::Tensor> scores = scorer.scores(scorer.outputs(rows, first, size));
    const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
    micros.push_back(took.count());
  }
  return micros;
}

void bench(const Options& options, const Rows& rows, const Scorer& scorer) {
  for (const std::int64_t size : options.bench) {
    const Rows enough = repeated(rows, size);
    const std::int64_t warm_up = std::min<std::int64_t>(options.repeat, 20);
    const std::int64_t batches = enough.count / size;
    time_batches(enough, scorer, size, batches, 0, warm_up);
    std::vector<double> micros =
        time_batches(enough, scorer, size, batches, warm_up, options.repeat);
    std::sort(micros.begin(), micros.end());
    double total = 0;
    for (const double x : micros) total += x;
    const auto n = micros.size();
    const auto share = [&](double q) {
      return micros[std::min(n - 1, static_cast<std::size_t>(q * static_cast<double>(n)))];
    };
    std::printf(
        "{\"batch\": %lld, \"threads\": %d, \"repeat\": %zu, \"p50_us\": %.1f, \"p99_us\": %.1f, "
        "\"rows_per_second\": %.0f}\n",
        static_cast<long long>(size), at::get_num_threads(), n, share(0.5), share(0.99),
        static_cast<double>(size) * static_cast<double>(n) / total * 1e6);
  }
}

// Time batches in turns with other programs: {"us": [...]} for each line "SIZE BATCHES COUNT". All
// rows are scored first, so that no turn is the first to touch a page.
void bench_in_turns(const Options& options, const Rows& rows, const Scorer& scorer) {
  for (std::int64_t first = 0; first < rows.count; first += options.batch) {
    scorer.outputs(rows, first, std::min(options.batch, rows.count - first));
  }
  std::map<std::int64_t, std::int64_t> number;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::int64_t size = 0;
    std::int64_t batches = 0;
    std::int64_t count = 0;
    if (!(words >> size >> batches >> count) || size < 1 || batches < 1 || count < 1 ||
        size > rows.count / batches) {
      throw Error("--turns: " + line.substr(0, 40) + ": must be SIZE BATCHES COUNT, with batches of " +
                  std::to_string(rows.count) + " rows at most together");
    }
    const char* before = "{\"us\": [";
    for (const double x : time_batches(rows, scorer, size, batches, number[size], count)) {
      std::printf("%s%.2f", before, x);
      before = ", ";
    }
    std::printf("]}\n");
    std::fflush(stdout);
    number[size] += count;
  }
}

void info(const Artefact& artefact) {
  std::uint64_t bytes = 0;
  for (const auto& [file, entry] : artefact.files) bytes += entry.bytes;
  std::printf("name      %s\nversion   %s\nbytes     %llu\ntorch     %s, %s\n", artefact.name.c_str(),
              artefact.version.c_str(), static_cast<unsigned long long>(bytes),
              artefact.compiled.torch.c_str(), artefact.compiled.machine.c_str());
  std::printf("example   scores as it did\nthreads   %d\narrow     %s\nfeatures  %zu dense, %zu sparse\n", at::get_num_threads(),
              has_arrow() ? "yes" : "no",
              artefact.dense.size(), artefact.sparse.size());
  for (const Table& t : artefact.tables) {
    std::printf("table     %s: %lld rows x %lld, %s%s\n", t.name.c_str(),
                static_cast<long long>(t.rows), static_cast<long long>(t.dim),
                name_of(t.storage), t.rule == Rule::dynamic ? ", dynamic" : "");
  }
}

void run(int count, char** words) {
  const Options options = read_options(count, words);
  if (options.help) {
    std::fputs(help(has_arrow()).c_str(), stdout);
    return;
  }
  const Artefact artefact = read_artefact(options.artefact);
  check_machine(artefact);
  if (options.threads) at::set_num_threads(options.threads);
  const c10::InferenceMode guard;
  const Scorer scorer(artefact, options.check_rows);
  check_example(artefact, scorer);
  if (options.info) return info(artefact);
  const Rows rows = read_input(options, artefact);
  if (options.turns) {
    bench_in_turns(options, rows, scorer);
  } else if (options.bench.empty()) {
    score(options, artefact, rows, scorer);
  } else {
    bench(options, rows, scorer);
  }
}

}  // namespace
}  // namespace recapp

int main(int count, char** words) {
  // keep freed memory: the system clears every page that a large batch gets anew
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
  try {
    recapp::run(count, words);
    return 0;
  } catch (const std::bad_alloc&) {
    std::fputs("error: there is not enough memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", recapp::first_line(error.what()).c_str());
  }
  return 1;
}

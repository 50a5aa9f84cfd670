// This file alone is compiled for a newer CPU than any other, and after the flags of the CPU were
// compared nobody calls it who has an older one. No operation may be fused (-ffp-contract=off).
#include "sum_rows.h"

#include <c10/util/Half.h>

#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace recapp {
namespace {

constexpr int BYTES = 32;     // of a register
constexpr int REGISTERS = 8;  // for the sum of a part of the columns
constexpr std::int64_t AHEAD = 16;

template <typename T>
struct Vector {
  static constexpr int LANES = BYTES / sizeof(T);
  typedef T Type __attribute__((vector_size(BYTES)));
  typedef std::uint8_t Bytes __attribute__((vector_size(LANES)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));
  typedef std::uint32_t Words __attribute__((vector_size(4 * LANES)));
  typedef float Floats __attribute__((vector_size(4 * LANES)));
  typedef double Doubles __attribute__((vector_size(8 * LANES)));
};

template <typename V>
inline V copied(const std::uint8_t* from) {
  V made;
  std::memcpy(&made, from, sizeof made);
  return made;
}

template <typename Number>
inline float number_at(const std::uint8_t* from) {
  Number made;
  std::memcpy(&made, from, sizeof made);
  return static_cast<float>(made);
}

// How a row is stored: `row` prepares one, `lanes` returns some columns as numbers of type T.
template <typename T, typename Lanes>
struct Floats {
  static constexpr int BITS = 8 * sizeof(Lanes) / Vector<T>::LANES;
  explicit Floats(std::int64_t) {}
  void row(const std::uint8_t*) {}
  typename Vector<T>::Type lanes(const std::uint8_t* from) const {
    return __builtin_convertvector(copied<Lanes>(from), typename Vector<T>::Type);
  }
};

template <typename T>
struct BFloats : Floats<T, typename Vector<T>::Halves> {
  using Floats<T, typename Vector<T>::Halves>::Floats;
  typename Vector<T>::Type lanes(const std::uint8_t* from) const {
    using V = Vector<T>;
    const auto words =
        __builtin_convertvector(copied<typename V::Halves>(from), typename V::Words) << 16;
    return __builtin_convertvector((typename V::Floats)words, typename V::Type);
  }
};

template <typename T>
struct Halves : Floats<T, typename Vector<T>::Halves> {
  using Floats<T, typename Vector<T>::Halves>::Floats;
  typename Vector<T>::Type lanes(const std::uint8_t* from) const {
    using V = Vector<T>;
    typename V::Floats made;
#ifdef __F16C__
    if constexpr (V::LANES == 8) {
      made = (typename V::Floats)_mm256_cvtph_ps(copied<__m128i>(from));
    } else {
      made = (typename V::Floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)from));
    }
#else
    for (int i = 0; i < V::LANES; ++i) made[i] = number_at<c10::Half>(from + 2 * i);
#endif
    return __builtin_convertvector(made, typename V::Type);
  }
};

// A packed row: values, scale, bias. Number is the type of the last two.
template <typename T, int BITS_, typename Number>
struct PackedRow {
  static constexpr int BITS = BITS_;
  using V = Vector<T>;
  std::int64_t numbers;
  T scale = 0;
  T bias = 0;

  explicit PackedRow(std::int64_t dim)
      : numbers(row_bytes(BITS == 8 ? Storage::int8 : Storage::int4, dim) -
                static_cast<std::int64_t>(2 * sizeof(Number))) {}
  void row(const std::uint8_t* from) {
    scale = static_cast<T>(number_at<Number>(from + numbers));
    bias = static_cast<T>(number_at<Number>(from + numbers + sizeof(Number)));
  }
  typename V::Type lanes(const std::uint8_t* from) const {
    typename V::Bytes q;
    if constexpr (BITS == 8) {
      q = copied<typename V::Bytes>(from);
    } else {
      std::uint64_t spread = 0;  // a byte for each half of a byte, the low one first
      std::memcpy(&spread, from, V::LANES / 2);
      spread = (spread | spread << 16) & 0x0000FFFF0000FFFFU;
      spread = (spread | spread << 8) & 0x00FF00FF00FF00FFU;
      spread = (spread | spread << 4) & 0x0F0F0F0F0F0F0F0FU;
      std::memcpy(&q, &spread, sizeof q);
    }
    return __builtin_convertvector(q, typename V::Type) * scale + bias;
  }
};

// Sum COUNT registers of columns from `column` on.
template <int COUNT, typename T, typename Stored>
inline void sum_part(Stored stored, std::int64_t column, const std::uint8_t* const* rows,
                     std::int64_t count, T weight, T* out) {
  using V = typename Vector<T>::Type;
  constexpr int LANES = Vector<T>::LANES;
  V sum[COUNT] = {};
  for (std::int64_t k = 0; k < count; ++k) {
    if (k + AHEAD < count) __builtin_prefetch(rows[k + AHEAD] + column * Stored::BITS / 8);
    const std::uint8_t* row = rows[k];
    stored.row(row);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
      sum[i] += stored.lanes(row + (column + i * LANES) * Stored::BITS / 8) * weight;
    }
  }
  std::memcpy(out + column, sum, sizeof sum);
}

// Sum the last columns, which do not fill a register: bytes behind a row may not be there, so those
// of the columns are copied.
template <typename T, typename Stored>
void sum_last(Stored stored, std::int64_t column, std::int64_t width,
              const std::uint8_t* const* rows, std::int64_t count, T weight, T* out) {
  typename Vector<T>::Type sum = {};
  const auto bytes = static_cast<std::size_t>((width * Stored::BITS + 7) / 8);
  for (std::int64_t k = 0; k < count; ++k) {
    std::uint8_t copy[8 * Vector<T>::LANES] = {};
    std::memcpy(copy, rows[k] + column * Stored::BITS / 8, bytes);
    stored.row(rows[k]);
    sum += stored.lanes(copy) * weight;
  }
  std::memcpy(out + column, &sum, static_cast<std::size_t>(width) * sizeof(T));
}

template <typename T, typename Stored>
void sum_all(std::int64_t dim, const std::uint8_t* const* rows, std::int64_t count, T weight,
             T* out) {
  constexpr std::int64_t LANES = Vector<T>::LANES;
  const Stored stored(dim);
  std::int64_t column = 0;
  for (; column + REGISTERS * LANES <= dim; column += REGISTERS * LANES) {
    sum_part<REGISTERS>(stored, column, rows, count, weight, out);
  }
  for (; column + 2 * LANES <= dim; column += 2 * LANES) {
    sum_part<2>(stored, column, rows, count, weight, out);
  }
  for (; column + LANES <= dim; column += LANES) {
    sum_part<1>(stored, column, rows, count, weight, out);
  }
  if (column < dim) sum_last(stored, column, dim - column, rows, count, weight, out);
}

}  // namespace

void sum_rows(Storage storage, std::int64_t dim, const std::uint8_t* const* rows,
              std::int64_t count, float weight, float* out) {
  using V = Vector<float>;
  switch (storage) {
    case Storage::fp64: break;  // is computed in 64 bits
    case Storage::fp32: return sum_all<float, Floats<float, V::Floats>>(dim, rows, count, weight, out);
    case Storage::fp16: return sum_all<float, Halves<float>>(dim, rows, count, weight, out);
    case Storage::bf16: return sum_all<float, BFloats<float>>(dim, rows, count, weight, out);
    case Storage::int8:
      return sum_all<float, PackedRow<float, 8, float>>(dim, rows, count, weight, out);
    case Storage::int4:
      return sum_all<float, PackedRow<float, 4, c10::Half>>(dim, rows, count, weight, out);
  }
}

void sum_rows(Storage storage, std::int64_t dim, const std::uint8_t* const* rows,
              std::int64_t count, double weight, double* out) {
  using V = Vector<double>;
  switch (storage) {
    case Storage::fp64:
      return sum_all<double, Floats<double, V::Doubles>>(dim, rows, count, weight, out);
    case Storage::fp32:
      return sum_all<double, Floats<double, V::Floats>>(dim, rows, count, weight, out);
    case Storage::fp16: return sum_all<double, Halves<double>>(dim, rows, count, weight, out);
    case Storage::bf16: return sum_all<double, BFloats<double>>(dim, rows, count, weight, out);
    case Storage::int8:
      return sum_all<double, PackedRow<double, 8, float>>(dim, rows, count, weight, out);
    case Storage::int4:
      return sum_all<double, PackedRow<double, 4, c10::Half>>(dim, rows, count, weight, out);
  }
}

}  // namespace recapp

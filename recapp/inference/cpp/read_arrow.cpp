// Compiled only where Arrow is there.
#include <arrow/api.h>
#include <arrow/buffer.h>
#include <arrow/io/memory.h>
#include <arrow/ipc/api.h>
#include <arrow/util/float16.h>

#include "read_rows.h"

namespace recapp {
namespace {

using arrow::Type;

bool is_list(const arrow::DataType& type) {
  return type.id() == Type::LIST || type.id() == Type::LARGE_LIST ||
         type.id() == Type::FIXED_SIZE_LIST;
}

bool is_text(const arrow::DataType& type) {
  switch (type.id()) {
    case Type::STRING:
    case Type::LARGE_STRING:
    case Type::BINARY:
    case Type::LARGE_BINARY:
    case Type::STRING_VIEW:
    case Type::BINARY_VIEW: return true;
    default: return false;
  }
}

bool is_number(const arrow::DataType& type) {
  return arrow::is_integer(type.id()) || arrow::is_floating(type.id());
}

const arrow::DataType& value_type(const arrow::DataType& type) {
  return type.id() == Type::DICTIONARY
             ? *static_cast<const arrow::DictionaryType&>(type).value_type()
             : type;
}

template <typename Array>
Value integer_at(const arrow::Array& column, std::int64_t row) {
  Value made;
  made.kind = Value::Kind::integer;
  const auto found = static_cast<const Array&>(column).Value(row);
  made.half = column.type_id() == Type::INT32;
  made.integer = static_cast<std::int64_t>(found);
  if (std::is_same_v<Array, arrow::UInt64Array> && made.integer < 0) {
    made.kind = Value::Kind::large;
    made.large = static_cast<std::uint64_t>(found);
  }
  return made;
}

Value number_value(double number) {
  Value made;
  made.kind = Value::Kind::number;
  made.number = number;
  return made;
}

template <typename Array>
Value text_at(const arrow::Array& column, std::int64_t row) {
  Value made;
  made.kind = Value::Kind::text;
  made.text = static_cast<const Array&>(column).GetView(row);
  return made;
}

Value value_at(const arrow::Array& column, std::int64_t row) {
  if (column.IsNull(row)) return {};
  Value made;
  switch (column.type_id()) {
    case Type::INT8: return integer_at<arrow::Int8Array>(column, row);
    case Type::INT16: return integer_at<arrow::Int16Array>(column, row);
    case Type::INT32: return integer_at<arrow::Int32Array>(column, row);
    case Type::INT64: return integer_at<arrow::Int64Array>(column, row);
    case Type::UINT8: return integer_at<arrow::UInt8Array>(column, row);
    case Type::UINT16: return integer_at<arrow::UInt16Array>(column, row);
    case Type::UINT32: return integer_at<arrow::UInt32Array>(column, row);
    case Type::UINT64: return integer_at<arrow::UInt64Array>(column, row);
    case Type::FLOAT: return number_value(static_cast<const arrow::FloatArray&>(column).Value(row));
    case Type::DOUBLE:
      return number_value(static_cast<const arrow::DoubleArray&>(column).Value(row));
    case Type::HALF_FLOAT:
      return number_value(arrow::util::Float16::FromBits(
                              static_cast<const arrow::HalfFloatArray&>(column).Value(row))
                              .ToDouble());
    case Type::STRING:
    case Type::BINARY: return text_at<arrow::BinaryArray>(column, row);
    case Type::LARGE_STRING:
    case Type::LARGE_BINARY: return text_at<arrow::LargeBinaryArray>(column, row);
    case Type::STRING_VIEW:
    case Type::BINARY_VIEW: return text_at<arrow::BinaryViewArray>(column, row);
    case Type::BOOL:
      made.kind = Value::Kind::boolean;
      made.integer = static_cast<const arrow::BooleanArray&>(column).Value(row);
      return made;
    case Type::TIMESTAMP: return integer_at<arrow::TimestampArray>(column, row);
    case Type::DATE32: return integer_at<arrow::Date32Array>(column, row);
    case Type::DATE64: return integer_at<arrow::Date64Array>(column, row);
    case Type::DICTIONARY: {
      const auto& coded = static_cast<const arrow::DictionaryArray&>(column);
      return value_at(*coded.dictionary(), coded.GetValueIndex(row));
    }
    default: return {};  // of type null
  }
}

// Return the ticks of a second in a type of times, negative for the seconds of a tick; 0 for a type
// of numbers.
std::int64_t ticks_of(const arrow::DataType& type) {
  if (type.id() == Type::DATE32) return -86400;
  if (type.id() == Type::DATE64) return 1000;
  if (type.id() != Type::TIMESTAMP) return 0;
  switch (static_cast<const arrow::TimestampType&>(type).unit()) {
    case arrow::TimeUnit::SECOND: return 1;
    case arrow::TimeUnit::MILLI: return 1000;
    case arrow::TimeUnit::MICRO: return 1000000;
    case arrow::TimeUnit::NANO: return 1000000000;
  }
  return 0;
}

// Reads tables of Arrow.
class ArrowRows {
 public:
  ArrowRows(const Artefact& artefact, const std::string& source)
      : builder_(artefact), source_(source) {}

  [[noreturn]] void fail(const std::string& why) const { throw Error(source_ + ": " + why); }

  template <typename T>
  T take(arrow::Result<T> result) const {
    if (!result.ok()) fail("cannot be read as Arrow: " + first_line(result.status().ToString()));
    return std::move(result).ValueUnsafe();
  }

  void check(const arrow::Schema& schema) {
    for (int i = 0; i < builder_.features(); ++i) {
      const std::string& name = builder_.name(i);
      const auto places = schema.GetAllFieldIndices(name);
      if (places.empty()) fail("there is no column for feature " + name);
      if (places.size() > 1) fail("column " + name + " is there more than once");
      places_.push_back(places[0]);
      check(i, *schema.field(places[0])->type());
    }
  }

  void add(const arrow::RecordBatch& batch) {
    const arrow::Status valid = batch.ValidateFull();
    if (!valid.ok()) fail("is damaged: " + first_line(valid.ToString()));
    builder_.add_rows(batch.num_rows());
    for (int i = 0; i < builder_.features(); ++i) {
      const arrow::Array& column = *batch.column(places_[static_cast<std::size_t>(i)]);
      for (row_ = 0; row_ < batch.num_rows(); ++row_) {
        try {
          add(i, column);
        } catch (const BadValue& error) {
          fail("column " + builder_.name(i) + ", row " + std::to_string(done_ + row_) + " " +
               error.what());
        }
      }
    }
    done_ += batch.num_rows();
  }

  Rows finish() { return builder_.finish(); }

 private:
  void check(int feature, const arrow::DataType& type) const {
    const arrow::DataType& value = value_type(type);
    const char* wanted = "numbers, or strings that spell numbers";
    bool good = is_number(value) || is_text(value) || value.id() == Type::NA ||
                value.id() == Type::BOOL;
    if (builder_.is_time(feature)) {
      wanted = "timestamps, dates, or whole numbers";
      good = is_number(value) || is_text(value) || value.id() == Type::NA || ticks_of(value);
    } else if (builder_.is_vector(feature)) {
      wanted = "lists of numbers";
      good = type.id() == Type::NA;
      if (is_list(type)) {
        const arrow::DataType& inner = value_type(*type.field(0)->type());
        good = is_number(inner) || inner.id() == Type::NA || inner.id() == Type::BOOL;
      }
    } else if (!builder_.is_dense(feature)) {
      const arrow::DataType& inner =
          is_list(type) ? value_type(*type.field(0)->type()) : value;
      wanted = "integers, text, or lists of those";
      good = is_number(inner) || is_text(inner) || inner.id() == Type::NA;
    }
    if (!good) {
      fail("column " + builder_.name(feature) + " has type " + type.ToString() +
           "; allowed: " + wanted);
    }
  }

  void add(int feature, const arrow::Array& column) {
    if (builder_.is_dense(feature)) {
      builder_.add_number(feature, done_ + row_, value_at(column, row_));
      return;
    }
    if (builder_.is_time(feature)) {
      const std::int64_t ticks = ticks_of(value_type(*column.type()));
      builder_.add_time(feature, done_ + row_, value_at(column, row_), ticks);
      return;
    }
    if (builder_.is_vector(feature)) {
      add_vector(feature, column);
      return;
    }
    switch (column.type_id()) {
      case Type::LIST: add_list<arrow::ListArray>(feature, column); break;
      case Type::LARGE_LIST: add_list<arrow::LargeListArray>(feature, column); break;
      case Type::FIXED_SIZE_LIST: add_list<arrow::FixedSizeListArray>(feature, column); break;
      default: builder_.add_id(feature, value_at(column, row_));
    }
    builder_.end_row(feature);
  }

  void add_vector(int feature, const arrow::Array& column) {
    switch (column.type_id()) {
      case Type::LIST: add_numbers<arrow::ListArray>(feature, column); break;
      case Type::LARGE_LIST: add_numbers<arrow::LargeListArray>(feature, column); break;
      case Type::FIXED_SIZE_LIST: add_numbers<arrow::FixedSizeListArray>(feature, column); break;
      default: break;  // of type null
    }
  }

  template <typename Array>
  void add_numbers(int feature, const arrow::Array& column) {
    const auto& lists = static_cast<const Array&>(column);
    if (lists.IsNull(row_)) return;
    const auto first = static_cast<std::int64_t>(lists.value_offset(row_));
    const auto length = static_cast<std::int64_t>(lists.value_length(row_));
    builder_.check_length(feature, length);
    for (std::int64_t at = 0; at < length; ++at) {
      builder_.add_to_vector(feature, done_ + row_, at, value_at(*lists.values(), first + at));
    }
  }

  template <typename Array>
  void add_list(int feature, const arrow::Array& column) {
    const auto& lists = static_cast<const Array&>(column);
    builder_.begin_list(feature);
    if (lists.IsNull(row_)) {
      builder_.add_id(feature, Value());
      return;
    }
    const auto first = static_cast<std::int64_t>(lists.value_offset(row_));
    const auto last = first + static_cast<std::int64_t>(lists.value_length(row_));
    for (std::int64_t at = first; at < last; ++at) {
      builder_.add_to_list(feature, value_at(*lists.values(), at));
    }
  }

  RowsBuilder builder_;
  std::string source_;
  std::vector<int> places_;
  std::int64_t done_ = 0;
  std::int64_t row_ = 0;
};

}  // namespace

bool has_arrow() { return true; }

Rows read_arrow(std::string_view bytes, const Artefact& artefact, const std::string& source) {
  ArrowRows rows(artefact, source);
  const auto input = std::make_shared<arrow::io::BufferReader>(std::make_shared<arrow::Buffer>(
      reinterpret_cast<const std::uint8_t*>(bytes.data()), static_cast<std::int64_t>(bytes.size())));
  if (bytes.substr(0, 6) == "ARROW1") {
    const auto reader = rows.take(arrow::ipc::RecordBatchFileReader::Open(input));
    rows.check(*reader->schema());
    for (int i = 0; i < reader->num_record_batches(); ++i) {
      rows.add(*rows.take(reader->ReadRecordBatch(i)));
    }
    return rows.finish();
  }
  const auto reader = rows.take(arrow::ipc::RecordBatchStreamReader::Open(input));
  rows.check(*reader->schema());
  std::shared_ptr<arrow::RecordBatch> batch;
  while (true) {
    const arrow::Status status = reader->ReadNext(&batch);
    if (!status.ok()) rows.fail("cannot be read as Arrow: " + first_line(status.ToString()));
    if (!batch) break;
    rows.add(*batch);
  }
  return rows.finish();
}

}  // namespace recapp

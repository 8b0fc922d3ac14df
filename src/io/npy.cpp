#include "io/npy.hpp"

#include <cstdio>
#include <cstring>
#include <memory>

#include "io/mapped_file.hpp"
#include "quant/numeric.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr std::size_t kMagicBytes = 6;

[[noreturn]] void bad(const std::string& file, std::string_view what) {
  throw Error(StatusCode::bad_file, concat("[npy] ", file, ": ", what));
}
[[noreturn]] void unsupported(const std::string& file, std::string_view what, std::string_view hint) {
  throw Error(StatusCode::unsupported, concat("[npy] ", file, ": ", what), std::string(hint));
}

struct Header {
  std::string descr;
  bool fortran = false;
  std::vector<std::int64_t> shape;
};

/// The header is a Python dict literal: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Header read() {
    Header header;
    int seen = 0;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !(seen & 1))
        header.descr = quoted(), seen |= 1;
      else if (key == "fortran_order" && !(seen & 2))
        header.fortran = truth(), seen |= 2;
      else if (key == "shape" && !(seen & 4))
        header.shape = tuple(), seen |= 4;
      else
        bad(file_, concat("header key '", key, "' is unknown or stands twice"));
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip();
    if (at_ != text_.size()) bad(file_, "header has something after the dict");
    if (seen != 7) bad(file_, "header must have descr, fortran_order and shape");
    return header;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool accept(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) bad(file_, concat("header is malformed at byte ", at_, ": expected '", c, "'"));
  }
  std::string quoted() {
    skip();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote == '[') unsupported(file_, "structured arrays are not read", "save one plain array");
    if (quote != '\'' && quote != '"') bad(file_, concat("header is malformed at byte ", at_, ": expected a string"));
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) bad(file_, "header has a string without an end");
    const std::string out(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return out;
  }
  bool truth() {
    skip();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {std::string_view("False"), false}})
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    bad(file_, "fortran_order must be True or False");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> out;
    expect('(');
    while (!accept(')')) {
      out.push_back(number());
      accept(',');
    }
    return out;
  }
  std::int64_t number() {
    skip();
    const std::size_t begin = at_;
    std::int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9')
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_++] - '0', &value))
        bad(file_, "header has an extent beyond 63 bits");
    if (at_ == begin) bad(file_, "shape must be a tuple of whole numbers");
    return value;
  }

  std::string_view text_;
  const std::string& file_;
  std::size_t at_ = 0;
};

DType element_type(const std::string& descr, NpyU16 u16, const std::string& file) {
  if (descr == "<f4") return DType::f32;
  if (descr == "<f2") return DType::f16;
  if (descr == "<i4") return DType::i32;
  if (descr == "<i8") return DType::i64;
  if (descr == "<u2" && u16 == NpyU16::as_bf16) return DType::bf16;
  if (descr.starts_with('>'))
    unsupported(file, concat("big-endian elements (", descr, ") are not read"),
                "save it with a.astype(a.dtype.newbyteorder('<'))");
  unsupported(file,
              concat("elements are ", descr, "; read are <f4, <f2, <i4 and <i8",
                     descr == "<u2" ? " (and <u2 as bf16 where that is asked for)" : ""),
              "convert it with a.astype(numpy.float32)");
}

std::string_view header_text(const MappedFile& file, std::size_t& data_begin) {
  const std::size_t size = file.size();
  const auto* bytes = reinterpret_cast<const unsigned char*>(file.data());
  if (size < kMagicBytes + 4 || std::memcmp(bytes, kMagic, kMagicBytes) != 0) bad(file.path(), "is no .npy file");
  const int major = bytes[6];
  if (major < 1 || major > 3) unsupported(file.path(), concat("format version ", major, " is not known"), "");
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  if (size < kMagicBytes + 2 + length_bytes) bad(file.path(), "is cut off in its header");
  std::size_t length = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) length |= std::size_t{bytes[kMagicBytes + 2 + i]} << (8 * i);
  const std::size_t begin = kMagicBytes + 2 + length_bytes;
  if (length > size - begin) bad(file.path(), concat("header length is ", length, ", the file has ", size - begin));
  data_begin = begin + length;
  return {reinterpret_cast<const char*>(bytes) + begin, length};
}

const char* descr_of(DType type) {
  switch (type) {
    case DType::f64: return "<f8";
    case DType::i32: return "<i4";
    case DType::i64: return "<i8";
    case DType::f32:
    case DType::bf16:
    case DType::f16: return "<f4";
    default: return nullptr;
  }
}

std::string header_of(const Tensor& tensor, const char* descr) {
  std::string shape;
  for (int axis = 0; axis < tensor.rank; ++axis) shape += concat(tensor.shape[static_cast<std::size_t>(axis)], ", ");
  if (tensor.rank > 1) shape.resize(shape.size() - 2);
  std::string text = concat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (", shape, "), }");
  const std::size_t before = kMagicBytes + 4;
  while ((before + text.size() + 1) % 64 != 0) text += ' ';
  text += '\n';
  std::string out(kMagic, kMagicBytes);
  out += '\1';
  out += '\0';
  out += static_cast<char>(text.size() & 0xff);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

/// Appends the elements in row-major order.
void append_elements(const Tensor& tensor, int axis, std::int64_t offset, std::vector<char>& out) {
  if (axis < tensor.rank) {
    for (std::int64_t i = 0; i < tensor.shape[static_cast<std::size_t>(axis)]; ++i)
      append_elements(tensor, axis + 1, offset + i * tensor.stride[static_cast<std::size_t>(axis)], out);
    return;
  }
  const bool narrow = tensor.dtype == DType::bf16 || tensor.dtype == DType::f16;
  const float widened = narrow ? numeric::load_f32(tensor.data, tensor.dtype, offset) : 0.0f;
  const auto size = static_cast<std::size_t>(narrow ? 4 : bytes(tensor.dtype));
  const char* element = narrow ? reinterpret_cast<const char*>(&widened)
                               : static_cast<const char*>(tensor.data) + offset * bytes(tensor.dtype);
  out.insert(out.end(), element, element + size);
}

}  // namespace

NpyArray read_npy(const std::string& path, NpyU16 u16) {
  const MappedFile file(path);
  std::size_t data_begin = 0;
  const Header header = HeaderReader(header_text(file, data_begin), path).read();
  const DType type = element_type(header.descr, u16, path);
  if (header.fortran && header.shape.size() > 1)
    unsupported(path, "Fortran order is not read", "save it with numpy.ascontiguousarray(a)");
  if (header.shape.size() > kMaxRank)
    unsupported(path, concat(header.shape.size(), " dimensions, at most ", kMaxRank, " are read"), "reshape it");
  std::int64_t size = bytes(type);
  bool empty = false;
  for (const std::int64_t extent : header.shape) {
    empty = empty || extent == 0;
    if (__builtin_mul_overflow(size, extent == 0 ? 1 : extent, &size)) bad(path, "size of the shape overflows");
  }
  if (empty) size = 0;
  if (static_cast<std::uint64_t>(size) != file.size() - data_begin)
    bad(path, concat("shape needs ", size, " bytes of data, the file has ", file.size() - data_begin));
  NpyArray out;
  out.storage.assign(file.data() + data_begin, file.data() + file.size());
  out.tensor = Tensor(static_cast<void*>(out.storage.data()), type, {});
  out.tensor.rank = static_cast<int>(header.shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = header.shape.size(); axis-- > 0;) {
    out.tensor.shape[axis] = header.shape[axis];
    out.tensor.stride[axis] = stride;
    stride *= header.shape[axis];
  }
  return out;
}

void write_npy(const std::string& path, const Tensor& tensor) {
  const char* descr = descr_of(tensor.dtype);
  if (!descr) unsupported(path, concat(name(tensor.dtype), " cannot be written as .npy"), "");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "wb"), &std::fclose);
  if (!file) bad(path, "cannot be created");
  const std::string header = header_of(tensor, descr);
  bool ok = std::fwrite(header.data(), 1, header.size(), file.get()) == header.size();
  std::vector<char> row;
  const std::int64_t rows = tensor.rank > 0 ? tensor.shape[0] : 1;
  for (std::int64_t i = 0; i < rows && ok; ++i) {
    row.clear();
    append_elements(tensor, tensor.rank > 0 ? 1 : 0, tensor.rank > 0 ? i * tensor.stride[0] : 0, row);
    ok = std::fwrite(row.data(), 1, row.size(), file.get()) == row.size();
  }
  if (!ok || std::fflush(file.get()) != 0) bad(path, "cannot be written; is the disk full?");
}

}  // namespace moekit::io

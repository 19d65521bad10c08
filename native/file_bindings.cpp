// Python's way to what reads files natively: rows of weights to be packed, and the strings of a GGUF header.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "checksum.h"
#include "stored_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Holds what the rows point to.
struct PackingJob {
    std::shared_ptr<PackedWeight> weight;
    Vector<uint8_t> bytes;
    std::optional<Vector<int64_t>> order;
    Vector<int32_t> target;
    StoredRows rows;
};

PackingJob make_job(std::shared_ptr<PackedWeight> weight, const std::string& kind, Vector<uint8_t> bytes,
                    std::optional<Vector<int64_t>> order, Vector<int32_t> target, bool mapped) {
    const Stored stored = stored_kind(kind);
    const int64_t rows = (int64_t)target.shape(0), row_bytes = stored_row_bytes(stored, weight->view().k);
    const int64_t held = order ? (int64_t)bytes.shape(0) / row_bytes : rows, needed = row_bytes * held;
    if ((int64_t)bytes.shape(0) != needed)
        throw std::invalid_argument("there are " + std::to_string(bytes.shape(0)) + " bytes, the rows take " + std::to_string(needed));
    if (order && (int64_t)order->shape(0) != rows) throw std::invalid_argument("order and target differ in length");
    StoredRows view{weight.get(), stored, bytes.data(), held, rows, order ? order->data() : nullptr, target.data(), mapped};
    return {std::move(weight), std::move(bytes), std::move(order), std::move(target), view};
}

// As many strings as can be read of `count`, each behind its length in 64 bits, and where the next would begin.
nb::tuple read_strings(Vector<uint8_t> bytes, uint64_t position, uint64_t count, uint64_t longest) {
    const uint64_t size = bytes.shape(0);
    nb::list strings;
    while (count-- > 0 && position <= size && size - position >= 8) {
        uint64_t length;
        std::memcpy(&length, bytes.data() + position, 8);
        if (length > longest || length > size - position - 8) break;
        PyObject* text = PyUnicode_DecodeUTF8((const char*)bytes.data() + position + 8, (Py_ssize_t)length, nullptr);
        if (!text) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
            PyErr_Clear();
            break;
        }
        strings.append(nb::steal(text));
        position += 8 + length;
    }
    return nb::make_tuple(strings, position);
}

}  // namespace

void bind_files(nb::module_& m) {
    nb::class_<PackingJob>(m, "PackingJob", "Rows of a tensor as a file holds them, and the packed columns they go to.")
        .def("__init__",
             [](PackingJob* job, std::shared_ptr<PackedWeight> weight, const std::string& kind, Vector<uint8_t> bytes,
                std::optional<Vector<int64_t>> order, Vector<int32_t> target, bool mapped) {
                 new (job) PackingJob(make_job(std::move(weight), kind, std::move(bytes), std::move(order), std::move(target), mapped));
             }, "weight"_a, "kind"_a, "bytes"_a, "order"_a.none(), "target"_a, "mapped"_a,
             "kind: a GGUF type. order: the stored row of each (of all that bytes hold). mapped: pages are let go once read.");
    m.def("pack_stored",
          [](const std::vector<const PackingJob*>& jobs, int threads, const std::string& level) {
              if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
              std::vector<StoredRows> all;
              for (const PackingJob* job : jobs) {
                  if (!job) throw std::invalid_argument("a job is None");
                  all.push_back(job->rows);
              }
              const KernelTable& kernels = kernel_table(level);
              nb::gil_scoped_release release;
              pack_stored(all, threads, kernels);
          }, "jobs"_a, "threads"_a, "level"_a = "",
          "Dense rows for w8 and w4 weights are rounded as octavo.quantization does; OverflowError if they cannot be.");
    m.def("checksum64",
          [](Vector<uint8_t> bytes) {
              nb::gil_scoped_release release;
              return checksum64(bytes.data(), bytes.size());
          }, "bytes"_a, "A fast 64-bit checksum, to find damage.");
    m.def("read_strings", &read_strings, "bytes"_a, "position"_a, "count"_a, "longest"_a,
          "The strings (each behind its 64-bit length) up to one too long or not UTF-8, and where that begins.");
}

}  // namespace octavo

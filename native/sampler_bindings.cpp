// Python's view of the sampler: its arrays without copies, its pools, and sampling rows one after another for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "green_list.h"
#include "kernel_table.h"
#include "sampler.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Ints = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMost = 1 << 28;

// The pools are numpy's memory; holding the arrays here keeps what the sampler points to alive.
struct PythonSampler : Sampler {
    using Sampler::Sampler;
    Ints lists, top_ids;
    Floats top_logprobs;
};

template <typename T>
nb::ndarray<nb::numpy, T> view(nb::handle owner, T* data, std::initializer_list<size_t> shape) {
    return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<Sampler>(m, "SamplerBase")
        .def_prop_ro("vocab", &Sampler::vocab)
        .def_prop_ro("max_rows", &Sampler::max_rows)
        .def_prop_ro("max_top", &Sampler::max_top)
        .def_prop_ro("max_workers", &Sampler::max_workers);
    nb::class_<PythonSampler, Sampler>(m, "Sampler")
        .def(
            "__init__",
            [](PythonSampler* self, int64_t vocab, int64_t max_rows, int64_t max_top, int64_t max_workers, const std::string& level) {
                if (vocab < 1 || vocab > kMost || max_rows < 1 || max_rows > kMost || max_workers < 1 || max_workers > 4096)
                    throw std::invalid_argument("Sampler: vocab, max_rows and max_workers must be positive and not huge");
                if (max_top < 0 || max_top > vocab) throw std::invalid_argument("Sampler: max_top must be 0 to vocab");
                new (self) PythonSampler(vocab, max_rows, max_top, max_workers, level);
            },
            nb::arg("vocab"), nb::arg("max_rows"), nb::arg("max_top"), nb::arg("max_workers"), nb::arg("level") = "",
            "level: instruction-set level (empty: the best one here), which changes no result.")
        .def_prop_ro("records", [](nb::handle_t<PythonSampler> h) {
            auto& s = nb::cast<PythonSampler&>(h);
            return view(h, (uint8_t*)s.records(), {(size_t)s.max_rows(), sizeof(SampleRecord)});
        })
        .def_prop_ro("tokens", [](nb::handle_t<PythonSampler> h) {
            auto& s = nb::cast<PythonSampler&>(h);
            return view(h, s.tokens(), {(size_t)s.max_rows()});
        })
        .def_prop_ro("logprobs", [](nb::handle_t<PythonSampler> h) {
            auto& s = nb::cast<PythonSampler&>(h);
            return view(h, s.logprobs(), {(size_t)s.max_rows()});
        })
        .def_prop_ro("ranks", [](nb::handle_t<PythonSampler> h) {
            auto& s = nb::cast<PythonSampler&>(h);
            return view(h, s.ranks(), {(size_t)s.max_rows()});
        })
        .def_prop_ro("statuses", [](nb::handle_t<PythonSampler> h) {
            auto& s = nb::cast<PythonSampler&>(h);
            return view(h, s.statuses(), {(size_t)s.max_rows()});
        })
        .def("set_pools",
             [](PythonSampler& s, Ints lists, Ints top_ids, Floats top_logprobs) {
                 if (top_ids.shape(0) != top_logprobs.shape(0))
                     throw std::invalid_argument("set_pools: top_ids and top_logprobs must be of one length");
                 s.lists = lists, s.top_ids = top_ids, s.top_logprobs = top_logprobs;
                 s.set_pools(lists.data(), (int64_t)lists.shape(0), top_ids.data(), top_logprobs.data(), (int64_t)top_ids.shape(0));
             },
             nb::arg("lists"), nb::arg("top_ids"), nb::arg("top_logprobs"))
        .def(
            "sample",
            [](PythonSampler& s, Rows logits, int64_t n_rows) {
                if (n_rows < 0 || n_rows > (int64_t)logits.shape(0) || n_rows > s.max_rows() || (int64_t)logits.shape(1) != s.vocab())
                    throw std::invalid_argument("sample: logits must be [at least n_rows, vocab] with n_rows at most max_rows");
                nb::gil_scoped_release release;
                for (int64_t row = 0; row < n_rows; ++row) s.sample_row(row, logits.data() + row * s.vocab(), 0);
            },
            nb::arg("logits"), nb::arg("n_rows"), "Runs rows 0 to n_rows - 1 one after another; changes the logits.")
        .def(
            "sample_row",
            [](PythonSampler& s, int64_t row, Floats logits, int64_t worker) {
                if ((int64_t)logits.shape(0) != s.vocab() || row < 0 || row >= s.max_rows() || worker < 0 || worker >= s.max_workers())
                    throw std::invalid_argument("sample_row: row, worker or the number of logits is out of range");
                nb::gil_scoped_release release;
                s.sample_row(row, logits.data(), worker);
            },
            nb::arg("row"), nb::arg("logits"), nb::arg("worker") = 0, "Runs one row; changes the logits.");
    m.def(
        "sampler_exp",
        [](const std::string& level, Floats x, Floats out) {
            int64_t n = (int64_t)x.shape(0), blocks = (n + kSampleBlock - 1) / kSampleBlock;
            if ((int64_t)out.shape(0) != n) throw std::invalid_argument("sampler_exp: arrays must be of one length");
            std::vector<float> exps(blocks * kSampleBlock), sums(blocks);
            kernel_table(level).sample_exponentials(x.data(), n, 0.0f, 1.0f, exps.data(), sums.data());
            std::copy_n(exps.data(), n, out.data());
        },
        nb::arg("level"), nb::arg("x"), nb::arg("out"), "out = e^x as the sampler computes it, for x of at most 0.");
    m.def("sampler_log", &sampler_log);
    m.def(
        "green_list",
        [](int64_t previous, int64_t vocab, Ints out) {
            if (vocab < 1 || vocab >= GreenList::kVocabEnd || previous < 0 || (int64_t)out.shape(0) > vocab)
                throw std::invalid_argument("green_list: previous must be a token, and out no longer than the vocabulary");
            nb::gil_scoped_release release;
            GreenList list(vocab);
            std::copy_n(list.select(previous, (int64_t)out.shape(0)), out.shape(0), out.data());
        },
        nb::arg("previous"), nb::arg("vocab"), nb::arg("out"),
        "Fills out with the first tokens of the watermark's permutation of the vocabulary after a token.");
    m.def("philox4x32", [](std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> c, std::tuple<uint32_t, uint32_t> k) {
        uint32_t counter[4] = {std::get<0>(c), std::get<1>(c), std::get<2>(c), std::get<3>(c)};
        uint32_t key[2] = {std::get<0>(k), std::get<1>(k)}, out[4];
        philox4x32(counter, key, out);
        return std::make_tuple(out[0], out[1], out[2], out[3]);
    });
}

}  // namespace octavo

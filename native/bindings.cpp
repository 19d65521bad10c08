// Python bindings of the native library: weights, plans, machine peaks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "peaks.h"
#include "plan.h"
#include "sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_files(nb::module_& m);
void bind_sampler(nb::module_& m);

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
void require_shape(const Matrix<T>& m, size_t rows, size_t columns, const char* what) {
    if (m.shape(0) != rows || m.shape(1) != columns)
        throw std::invalid_argument(std::string(what) + " has shape (" + std::to_string(m.shape(0)) + ", " + std::to_string(m.shape(1)) +
                                    "), expected (" + std::to_string(rows) + ", " + std::to_string(columns) + ")");
}

std::vector<float> floats(const std::optional<Vector<float>>& v) {
    if (!v) return {};
    return std::vector<float>(v->data(), v->data() + v->shape(0));
}

template <class T>
nb::object array_view(std::vector<T>& data, std::initializer_list<size_t> shape, nb::handle owner) {
    return nb::cast(nb::ndarray<nb::numpy, T>(data.data(), shape, owner));
}

void bind_weights(nb::module_& m) {
    nb::class_<Region>(m, "Region", "Zeroed anonymous memory on huge pages where the system allows.")
        .def(nb::init<size_t>(), "bytes"_a)
        .def_static("map_file", &Region::map_file, "path"_a, "bytes"_a, "writable"_a,
                    "The first bytes of a file, to be read in place or (writable) filled.")
        .def("flush", &Region::flush, nb::call_guard<nb::gil_scoped_release>(),
             "Of a file being filled: writes it out and lets go of its memory.")
        .def_prop_ro("bytes", [](nb::handle_t<Region> h) {
            auto& region = nb::cast<Region&>(h);
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(region.data(), {region.size()}, h);
        }, "All of it, to be read.")
        .def_prop_ro("size", &Region::size)
        .def_prop_ro("used", &Region::used);
    nb::enum_<Form>(m, "Form").value("F32", Form::F32).value("BF16", Form::BF16).value("W8", Form::W8).value("W4", Form::W4)
        .value("Lut4", Form::Lut4).value("Lut4F", Form::Lut4F).value("E4M3", Form::E4M3).value("E5M2", Form::E5M2);
    nb::class_<PackedWeight>(m, "PackedWeight", "A weight matrix in panels of 16 columns.")
        .def("__init__",
             [](PackedWeight* w, std::shared_ptr<Region> region, Form form, int64_t columns, int64_t k, int64_t group, int zero, bool minimum,
                bool scale_f16, int rotation, std::optional<Vector<float>> table) {
                 if (table && table->shape(0) != 16) throw std::invalid_argument("a table has 16 numbers, not " + std::to_string(table->shape(0)));
                 new (w) PackedWeight(std::move(region), form, columns, k, group, zero, minimum, scale_f16, rotation,
                                      table ? table->data() : nullptr);
             }, "region"_a, "form"_a, "columns"_a, "k"_a, "group"_a = 0, "zero"_a = 0, "minimum"_a = false, "scale_f16"_a = false,
             "rotation"_a = 0, "table"_a = nb::none())
        .def_static("bytes_needed", &PackedWeight::bytes_needed, "form"_a, "columns"_a, "k"_a, "group"_a = 0, "minimum"_a = false,
                    "scale_f16"_a = false)
        .def("pack_f32",
             [](PackedWeight& w, Vector<int32_t> target, Matrix<float> values) {
                 require_shape(values, target.shape(0), (size_t)w.view().k, "values");
                 nb::gil_scoped_release release;
                 w.pack_f32(target.data(), (int64_t)target.shape(0), values.data());
             }, "target"_a, "values"_a)
        .def("pack_bf16",
             [](PackedWeight& w, Vector<int32_t> target, Matrix<uint16_t> values) {
                 require_shape(values, target.shape(0), (size_t)w.view().k, "values");
                 nb::gil_scoped_release release;
                 w.pack_bf16(target.data(), (int64_t)target.shape(0), values.data());
             }, "target"_a, "values"_a)
        .def("pack_affine",
             [](PackedWeight& w, Vector<int32_t> target, Matrix<uint8_t> codes, Matrix<float> scales, std::optional<Matrix<float>> minimums) {
                 const size_t rows = target.shape(0);
                 if (w.view().group == 0) throw std::invalid_argument("pack_affine fills w8 and w4 weights");
                 const size_t groups = (size_t)ceil_div(w.view().k, w.view().group);
                 require_shape(codes, rows, (size_t)w.view().k, "codes");
                 require_shape(scales, rows, groups, "scales");
                 if (minimums) require_shape(*minimums, rows, groups, "minimums");
                 nb::gil_scoped_release release;
                 w.pack_affine(target.data(), (int64_t)rows, codes.data(), scales.data(), minimums ? minimums->data() : nullptr);
             }, "target"_a, "codes"_a, "scales"_a, "minimums"_a = nb::none())
        .def("pack_codes",
             [](PackedWeight& w, Vector<int32_t> target, Matrix<uint8_t> codes, Matrix<float> scales) {
                 const size_t rows = target.shape(0);
                 if (w.view().group == 0) throw std::invalid_argument("pack_codes fills weights whose codes are those of a table");
                 require_shape(codes, rows, (size_t)w.view().k, "codes");
                 require_shape(scales, rows, (size_t)ceil_div(w.view().k, w.view().group), "scales");
                 nb::gil_scoped_release release;
                 w.pack_codes(target.data(), (int64_t)rows, codes.data(), scales.data());
             }, "target"_a, "codes"_a, "scales"_a)
        .def("column",
             [](const PackedWeight& w, int64_t index) {
                 auto* values = new float[(size_t)w.view().k];
                 nb::capsule owner(values, [](void* p) noexcept { delete[] (float*)p; });
                 w.column(index, values);
                 return nb::ndarray<nb::numpy, float, nb::ndim<1>>(values, {(size_t)w.view().k}, owner);
             }, "index"_a)
        .def_prop_ro("form", [](const PackedWeight& w) { return w.view().form; })
        .def_prop_ro("columns", &PackedWeight::real_columns)
        .def_prop_ro("padded_columns", [](const PackedWeight& w) { return w.view().columns; })
        .def_prop_ro("k", [](const PackedWeight& w) { return w.view().k; })
        .def_prop_ro("k_padded", [](const PackedWeight& w) { return w.view().k_padded; })
        .def_prop_ro("group", [](const PackedWeight& w) { return w.view().group; })
        .def_prop_ro("nbytes", &PackedWeight::bytes)
        .def_prop_ro("offset", &PackedWeight::offset, "Where it begins in its region.");
}

void bind_plan(nb::module_& m) {
    nb::enum_<Act>(m, "Act").value("F32", Act::F32).value("BF16", Act::BF16).value("I8", Act::I8);
    nb::enum_<KvType>(m, "KvType")
        .value("F32", KvType::F32).value("BF16", KvType::BF16).value("F16", KvType::F16).value("E4M3", KvType::E4M3)
        .value("E5M2", KvType::E5M2).value("E4M3Scaled", KvType::E4M3Scaled).value("I8", KvType::I8)
        .value("I4", KvType::I4);
    nb::enum_<Epilogue>(m, "Epilogue")
        .value("Store", Epilogue::Store).value("Add", Epilogue::Add).value("SiluMul", Epilogue::SiluMul)
        .value("GeluMul", Epilogue::GeluMul).value("GeluTanhMul", Epilogue::GeluTanhMul).value("Gelu", Epilogue::Gelu)
        .value("GeluTanh", Epilogue::GeluTanh).value("Silu", Epilogue::Silu).value("Relu", Epilogue::Relu).value("Relu2", Epilogue::Relu2)
        .value("ClampedSiluMul", Epilogue::ClampedSiluMul);
    nb::enum_<Scoring>(m, "Scoring")
        .value("Softmax", Scoring::Softmax).value("Sigmoid", Scoring::Sigmoid).value("SoftmaxOfChosen", Scoring::SoftmaxOfChosen);
    nb::enum_<Elementwise>(m, "Elementwise")
        .value("Add", Elementwise::Add).value("Scale", Elementwise::Scale).value("Softcap", Elementwise::Softcap)
        .value("SiluMul", Elementwise::SiluMul).value("GeluMul", Elementwise::GeluMul).value("GeluTanhMul", Elementwise::GeluTanhMul)
        .value("Gelu", Elementwise::Gelu).value("GeluTanh", Elementwise::GeluTanh).value("Silu", Elementwise::Silu)
        .value("Relu", Elementwise::Relu).value("Relu2", Elementwise::Relu2).value("Clip", Elementwise::Clip)
        .value("SigmoidGate", Elementwise::SigmoidGate);
    nb::class_<Activation>(m, "Activation", "Where a value lies in the arena; offsets in bytes.")
        .def("__init__",
             [](Activation* a, Act form, int64_t width, int64_t data, int group, int64_t scales, int64_t scaled_sums, int64_t sums,
                int rotation) {
                 new (a) Activation{form, width, group, data, scales, scaled_sums, sums, rotation};
             }, "form"_a, "width"_a, "data"_a, "group"_a = 32, "scales"_a = 0, "scaled_sums"_a = 0, "sums"_a = 0, "rotation"_a = 0)
        .def_ro("form", &Activation::form).def_ro("width", &Activation::width).def_ro("group", &Activation::group)
        .def_ro("data", &Activation::data).def_ro("scales", &Activation::scales)
        .def_ro("scaled_sums", &Activation::scaled_sums).def_ro("sums", &Activation::sums);
    nb::class_<Plan>(m, "Plan", "A compiled model: operations over one arena, run for a whole step in one call.")
        .def("__init__",
             [](Plan* plan, const std::string& level, int threads, int64_t max_tokens, int64_t max_sequences, int64_t table_stride,
                int64_t head_rows, int64_t vocab, int64_t arena_bytes) {
                 if (threads < 1 || threads > 1024 || max_tokens < 1 || max_sequences < 1 || table_stride < 1 || head_rows < 1 || vocab < 1)
                     throw std::invalid_argument("threads (up to 1024), max_tokens, max_sequences, table_stride, head_rows and vocab must be at least 1");
                 new (plan) Plan(level, threads, StepLimits{max_tokens, max_sequences, table_stride, head_rows, vocab}, arena_bytes);
             }, "level"_a, "threads"_a, "max_tokens"_a, "max_sequences"_a, "table_stride"_a, "head_rows"_a, "vocab"_a, "arena_bytes"_a)
        .def("add_embed", &Plan::add_embed, "name"_a, "weight"_a, "out"_a, "scale"_a = 1.0f, "positions"_a = false, "offset"_a = 0)
        .def("add_norm",
             [](Plan& p, std::string name, const Activation& x, int64_t width, std::optional<Vector<float>> weight,
                std::optional<Vector<float>> bias, float eps, bool layer, const Activation& out, bool gather,
                std::optional<Vector<int32_t>> order) {
                 std::vector<int32_t> places;
                 if (order) places.assign(order->data(), order->data() + order->shape(0));
                 p.add_norm(std::move(name), x, width, floats(weight), floats(bias), eps, layer, out, gather, places);
             }, "name"_a, "x"_a, "width"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "layer"_a, "out"_a, "gather"_a = false,
             "order"_a = nb::none())
        .def("add_linear",
             [](Plan& p, std::string name, std::shared_ptr<PackedWeight> weight, const Activation& in, std::optional<Vector<float>> bias,
                Epilogue epilogue, const Activation& out, int64_t out_columns) {
                 p.add_linear(std::move(name), std::move(weight), in, floats(bias), epilogue, out, out_columns);
             }, "name"_a, "weight"_a, "x"_a, "bias"_a.none(), "epilogue"_a, "out"_a, "out_columns"_a)
        .def("add_rope_tables",
             [](Plan& p, Vector<float> cos, Vector<float> sin) {
                 if (cos.shape(0) != sin.shape(0)) throw std::invalid_argument("rope tables differ in size");
                 return p.add_rope_tables(cos.data(), sin.data(), (int64_t)cos.shape(0));
             }, "cos"_a, "sin"_a)
        .def("add_query_factors", [](Plan& p, Vector<float> factors) { return p.add_query_factors(floats(factors)); }, "factors"_a)
        .def("add_rope",
             [](Plan& p, std::string name, const Activation& qkv, int layer, int q_heads, int kv_heads, int head_dim, int rope_dim,
                int tables, std::optional<Vector<float>> q_norm, std::optional<Vector<float>> k_norm, float norm_eps, const Activation& q,
                bool norm_layer, bool wide_norms, bool norm_after, int factors) {
                 p.add_rope(std::move(name), qkv, layer, q_heads, kv_heads, head_dim, rope_dim, tables, floats(q_norm), floats(k_norm),
                            norm_eps, q, norm_layer, wide_norms, norm_after, factors);
             }, "name"_a, "qkv"_a, "layer"_a, "q_heads"_a, "kv_heads"_a, "head_dim"_a, "rope_dim"_a, "tables"_a, "q_norm"_a.none(),
             "k_norm"_a.none(), "norm_eps"_a, "q"_a, "norm_layer"_a = false, "wide_norms"_a = false, "norm_after"_a = false, "factors"_a = -1)
        .def("add_attention",
             [](Plan& p, std::string name, const Activation& q, int layer, int q_heads, int kv_heads, int head_dim, float scale, float softcap,
                int window, const Activation& out, std::optional<Vector<float>> slopes, bool chunked, std::optional<Vector<float>> sinks) {
                 p.add_attention(std::move(name), q, layer, q_heads, kv_heads, head_dim, scale, softcap, window, out, floats(slopes), chunked,
                                 floats(sinks));
             }, "name"_a, "q"_a, "layer"_a, "q_heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a, "window"_a, "out"_a,
             "slopes"_a.none() = nb::none(), "chunked"_a = false, "sinks"_a.none() = nb::none())
        .def("add_route",
             [](Plan& p, std::string name, const Activation& logits, int experts, int top_k, Scoring scoring, bool renormalize, float scale,
                std::optional<Vector<float>> correction, int groups, int top_groups, bool group_pairs, const Activation& out) {
                 RouteArgs a;
                 a.experts = experts, a.top_k = top_k, a.scoring = scoring, a.renormalize = renormalize, a.scale = scale;
                 a.groups = groups, a.top_groups = top_groups, a.group_pairs = group_pairs;
                 p.add_route(std::move(name), logits, a, floats(correction), out);
             }, "name"_a, "logits"_a, "experts"_a, "top_k"_a, "scoring"_a, "renormalize"_a, "scale"_a, "correction"_a.none(), "groups"_a,
             "top_groups"_a, "group_pairs"_a, "out"_a)
        .def("add_experts",
             [](Plan& p, std::string name, const Activation& route, int top_k, const Activation& x, const Plan::Weights& gate_up,
                std::optional<Vector<float>> gate_up_bias, Epilogue activation, float alpha, float limit, const Activation& hidden,
                const Plan::Weights& down, std::optional<Vector<float>> down_bias, bool add, const Activation& out, int64_t out_columns,
                bool scale_inputs) {
                 p.add_experts(std::move(name), route, top_k, x, gate_up, floats(gate_up_bias), activation, alpha, limit, hidden, down,
                               floats(down_bias), add, out, out_columns, scale_inputs);
             }, "name"_a, "route"_a, "top_k"_a, "x"_a, "gate_up"_a, "gate_up_bias"_a.none(), "activation"_a, "alpha"_a, "limit"_a, "hidden"_a,
             "down"_a, "down_bias"_a.none(), "add"_a, "out"_a, "out_columns"_a, "scale_inputs"_a = false)
        .def("add_head_linear", &Plan::add_head_linear, "name"_a, "weights"_a, "x"_a, "in_first"_a, "in_step"_a, "out"_a, "out_first"_a,
             "out_step"_a)
        .def("add_latent",
             [](Plan& p, std::string name, int layer, const Activation& q, int64_t q_first, int64_t q_step, const Activation& kv,
                int64_t kv_first, int heads, int rank, int rope_dim, bool interleaved, int tables, Vector<float> norm, float norm_eps, const Activation& q_out) {
                 LatentArgs a;
                 a.q_first = q_first, a.q_step = q_step, a.kv_first = kv_first, a.heads = heads, a.rank = rank, a.rope_dim = rope_dim;
                 a.interleaved = interleaved, a.norm_eps = norm_eps;
                 p.add_latent(std::move(name), layer, q, kv, a, tables, {norm.data(), norm.data() + norm.shape(0)}, q_out);
             }, "name"_a, "layer"_a, "q"_a, "q_first"_a, "q_step"_a, "kv"_a, "kv_first"_a, "heads"_a, "rank"_a, "rope_dim"_a, "interleaved"_a, "tables"_a,
             "norm"_a, "norm_eps"_a, "q_out"_a)
        .def("add_elementwise",
             [](Plan& p, std::string name, Elementwise kind, const Activation& a, std::optional<Activation> b, int64_t width, float scalar,
                const Activation& out) { p.add_elementwise(std::move(name), kind, a, b ? &*b : nullptr, width, scalar, out); },
             "name"_a, "kind"_a, "a"_a, "b"_a.none(), "width"_a, "scalar"_a, "out"_a)
        .def("set_bidirectional", &Plan::set_bidirectional,
             "Has every token attend to the whole of its sequence; before the first attention.")
        .def("begin_head", &Plan::begin_head)
        .def("set_logits", &Plan::set_logits, "logits"_a)
        .def("make_pool", [](Plan& p, int64_t blocks, KvType kv, std::optional<Vector<float>> scales) { p.make_pool(blocks, kv, floats(scales)); },
             "blocks"_a, "kv"_a, "scales"_a.none() = nb::none())
        .def("prefault_pool", &Plan::prefault_pool, "bytes"_a)
        .def_prop_ro("pool_prefaulted", &Plan::pool_prefaulted)
        .def("copy_blocks",
             [](Plan& p, Matrix<int32_t> pairs) {
                 if (pairs.shape(1) != 2) throw std::invalid_argument("pairs has two columns: source and destination block");
                 p.copy_blocks(pairs.data(), (int64_t)pairs.shape(0));
             }, "pairs"_a)
        .def("run",
             [](Plan& p, int64_t sequences, int64_t rows, Sampler* sampler,
                std::optional<nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>> logits) {
                 if (logits && ((int64_t)logits->shape(0) < rows || (int64_t)logits->shape(1) != p.limits().vocab))
                     throw std::invalid_argument("logits must hold the rows wanted, each as wide as the vocabulary");
                 float* out = logits ? logits->data() : nullptr;
                 nb::gil_scoped_release release;
                 p.run(sequences, rows, sampler, out);
             }, "sequences"_a, "rows"_a, "sampler"_a.none() = nb::none(), "logits"_a = nb::none())
        .def_prop_ro("tokens", [](nb::handle_t<Plan> h) { auto& p = nb::cast<Plan&>(h); return array_view(p.tokens, {p.tokens.size()}, h); })
        .def_prop_ro("starts", [](nb::handle_t<Plan> h) { auto& p = nb::cast<Plan&>(h); return array_view(p.starts, {p.starts.size()}, h); })
        .def_prop_ro("counts", [](nb::handle_t<Plan> h) { auto& p = nb::cast<Plan&>(h); return array_view(p.counts, {p.counts.size()}, h); })
        .def_prop_ro("logit_rows", [](nb::handle_t<Plan> h) { auto& p = nb::cast<Plan&>(h); return array_view(p.logit_rows, {p.logit_rows.size()}, h); })
        .def_prop_ro("block_tables", [](nb::handle_t<Plan> h) {
            auto& p = nb::cast<Plan&>(h);
            return array_view(p.block_tables, {(size_t)p.limits().max_sequences, (size_t)p.limits().table_stride}, h);
        })
        .def_prop_ro("arena", [](nb::handle_t<Plan> h) {
            auto& p = nb::cast<Plan&>(h);
            return nb::ndarray<nb::numpy, uint8_t>(p.arena(), {(size_t)p.arena_bytes()}, h);
        })
        .def_prop_ro("block_bytes", &Plan::block_bytes, "Bytes of one block over all layers.")
        .def_prop_ro("threads", &Plan::threads)
        .def_prop_ro("level", [](const Plan& p) { return std::string(p.level()); })
        .def("set_profiling", &Plan::set_profiling, "on"_a)
        .def("profile", [](const Plan& p) {
            nb::list rows;
            for (const auto& e : p.profile()) {
                nb::dict d;
                d["op"] = e.name;
                d["calls"] = e.calls;
                d["seconds"] = e.seconds;
                d["bytes"] = e.bytes;
                d["operations"] = e.operations;
                rows.append(d);
            }
            return rows;
        })
        .def("linears", [](const Plan& p) {
            nb::list all;
            for (const auto& linear : p.linears()) {
                const LinearArgs& a = linear.args;
                nb::dict d;
                d["name"] = linear.name;
                d["form"] = a.w.form;
                d["columns"] = a.w.columns;
                d["k"] = a.w.k_padded;
                d["group"] = a.w.group;
                d["minimum"] = a.w.minimums != nullptr;
                d["epilogue"] = a.epilogue;
                d["output"] = a.out.form;
                d["max_rows"] = linear.max_rows;
                all.append(d);
            }
            return all;
        }, "The products of the plan in the order they were added, body before head: what tiles are chosen for.")
        .def("linear_times", [](const Plan& p) {
            std::vector<std::tuple<int64_t, double>> times;
            for (const auto& linear : p.linears()) times.emplace_back(linear.args.rows, linear.seconds);
            return times;
        }, "Rows and seconds of every linear in the last run; the seconds when it was profiled.")
        .def("set_tile",
             [](Plan& p, int64_t linear, int64_t first_rows, int64_t last_rows, int64_t row_tile, int64_t column_tile, int64_t regions) {
                 p.set_tile(linear, {first_rows, last_rows, {row_tile, column_tile, regions}});
             }, "linear"_a, "first_rows"_a, "last_rows"_a, "row_tile"_a, "column_tile"_a, "regions"_a)
        .def("clear_tiles", &Plan::clear_tiles, "Goes back to the built-in tiles.")
        .def("tile_of",
             [](Plan& p, int64_t linear, int64_t rows) {
                 const TileShape t = p.tile_of(linear, rows);
                 return std::make_tuple(t.row_tile, t.column_tile, t.regions);
             }, "linear"_a, "rows"_a, "Row tile, column tile and regions that a linear of this many rows is cut into.");
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a forked child that exits holds what its parent had: no fault of the user
    m.doc() = "octavo's native library: plans, kernels, weights and the sampler.";
    octavo::bind_weights(m);
    octavo::bind_files(m);
    octavo::bind_sampler(m);
    octavo::bind_plan(m);
    m.def("available_levels", &octavo::available_levels, "Instruction-set levels compiled in and runnable here, worst first.");
    m.def("measure_machine",
          [](const std::string& level, int threads, double seconds) {
              octavo::MachinePeaks p;
              {
                  nb::gil_scoped_release release;
                  p = octavo::measure_machine(level, threads, seconds);
              }
              nb::dict d;
              d["f32_gflops"] = p.f32;
              d["bf16_gflops"] = p.bf16;
              d["int8_gops"] = p.int8;
              d["dram_gbps"] = p.dram;
              d["l3_gbps"] = p.l3;
              d["l2_gbps"] = p.l2;
              return d;
          }, "level"_a, "threads"_a, "seconds"_a = 0.2);
}

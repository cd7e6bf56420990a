#include "python/src/options.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>

#include "python/src/bounds.h"
#include "python/src/engine.h"

namespace sparge::python {
namespace {

// What the options say before shapes are known: scalars, or one value per head.
struct Given {
  std::optional<std::vector<double>> theta, tau, topk, pv_skip;
  std::optional<std::vector<sparge_precision>> precision;
  std::optional<sparge_select> select;
  GivenBounds bounds;
  std::optional<uint64_t> seed;

  bool exact() const { return bounds.target_l1 == 0.0 || bounds.target_l2 == 0.0; }
  bool other_bounds() const { return bounds.pv_l1 || bounds.pv_l2 || bounds.round_l1; }
  bool has_bounds() const { return bounds.target_l1 || bounds.target_l2 || other_bounds() || seed; }
  bool sink = false;
};

struct Reading {
  Described& described;
  Given& given;
  const char* name;
  nb::handle value;
};

std::string Text(nb::handle value) { return nb::repr(value).c_str(); }

template <class T>
T Cast(const Reading& r, const char* wanted) {
  T value;
  if (!nb::try_cast(r.value, value)) RaiseType(std::string(r.name) + "=" + Text(r.value) + " is no " + wanted);
  return value;
}

bool Bool(const Reading& r) { return Cast<bool>(r, "bool"); }
int64_t Int(const Reading& r) { return Cast<int64_t>(r, "int"); }
double Float(const Reading& r) { return Cast<double>(r, "float"); }

void NotZero(const Reading& r, double value) {
  if (value == 0) RaiseValue(std::string(r.name) + "=0: leave it out, or give another value");
}

// Within what the library takes, so that no value is changed on its way there.
int64_t IntBetween(const Reading& r, int64_t low, int64_t high) {
  const int64_t value = Int(r);
  if (value < low || value > high) {
    RaiseValue(std::string(r.name) + "=" + std::to_string(value) + " is outside " + std::to_string(low) + ".." +
               std::to_string(high));
  }
  return value;
}

template <class E>
struct Named {
  std::string_view name;
  E value;
};

template <class E>
E OneOf(const char* name, nb::handle value, std::span<const Named<E>> choices) {
  nb::str text;
  if (nb::try_cast(value, text)) {
    for (const Named<E>& choice : choices) {
      if (choice.name == text.c_str()) return choice.value;
    }
  }
  std::string all;
  for (const Named<E>& choice : choices) all += (all.empty() ? "" : ", ") + std::string(choice.name);
  RaiseValue(std::string(name) + "=" + Text(value) + " is none of " + all);
}

template <class E>
const char* NameIn(E value, std::span<const Named<E>> choices) {
  for (const Named<E>& choice : choices) {
    if (choice.value == value) return choice.name.data();
  }
  return "";
}

constexpr Named<sparge_precision> kPrecisions[] = {
    {"fp32", SPARGE_PRECISION_FP32}, {"int16", SPARGE_PRECISION_INT16}, {"int8", SPARGE_PRECISION_INT8}};
constexpr Named<sparge_select> kSelects[] = {{"auto", SPARGE_SELECT_AUTO},   {"all", SPARGE_SELECT_ALL},
                                             {"cdf", SPARGE_SELECT_CDF},     {"topk", SPARGE_SELECT_TOPK},
                                             {"floor", SPARGE_SELECT_FLOOR}, {"map", SPARGE_SELECT_MAP}};
constexpr Named<sparge_predictor> kPredictors[] = {
    {"default", SPARGE_PREDICT_DEFAULT}, {"keys", SPARGE_PREDICT_KEYS}, {"paper", SPARGE_PREDICT_PAPER}};
constexpr Named<Layout> kLayouts[] = {{"HND", Layout::kHeadsFirst}, {"NHD", Layout::kTokensFirst}};

// A sequence that is no text.
bool IsSequence(nb::handle value) { return PySequence_Check(value.ptr()) && !nb::isinstance<nb::str>(value); }

template <class T, class Element>
std::vector<T> Sequence(const Reading& r, const Element& element) {
  if (!IsSequence(r.value)) RaiseType(std::string(r.name) + "=" + Text(r.value) + " is no list");
  std::vector<T> values;
  for (nb::handle item : nb::borrow(r.value)) {
    values.push_back(element(Reading{r.described, r.given, r.name, item}));
  }
  if (values.empty()) RaiseValue(std::string(r.name) + " is empty");
  return values;
}

template <class T, class Element>
std::vector<T> OneOrMany(const Reading& r, const Element& element) {
  if (IsSequence(r.value)) return Sequence<T>(r, element);
  return {element(r)};
}

std::vector<float> Floats(const Reading& r) {
  return Sequence<float>(r, [](const Reading& item) { return static_cast<float>(Float(item)); });
}

// "off" and None mean never.
double PvSkip(const Reading& r) {
  nb::str text;
  if (r.value.is_none() || (nb::try_cast(r.value, text) && std::string_view(text.c_str()) == "off")) {
    return SPARGE_PV_SKIP_OFF;
  }
  return Float(r);
}

void ReadGrid(const Reading& r) {
  const auto sides = Sequence<int64_t>(r, Int);
  if (sides.size() != 3) RaiseValue("grid=" + Text(r.value) + " is not (T, H, W)");
  std::copy(sides.begin(), sides.end(), r.described.desc.grid);
}

// Options say what is asked, or how exactly it is to be done.
enum class Says { kWhat, kHow };

struct Option {
  std::string_view name;
  Says says;
  void (*read)(const Reading&);
};

constexpr Option kOptions[] = {
    {"layout", Says::kWhat, [](const Reading&) {}},  // ReadLayout
    {"causal", Says::kWhat, [](const Reading& r) { r.described.desc.causal = Bool(r); }},
    {"query_offset", Says::kWhat, [](const Reading& r) { r.described.desc.query_offset = Int(r); }},
    // To the library 0 means none, or the default; who writes 0 here wants something else.
    {"window", Says::kWhat, [](const Reading& r) { NotZero(r, r.described.desc.window = Int(r)); }},
    {"scale", Says::kWhat, [](const Reading& r) { NotZero(r, r.described.desc.scale = Float(r)); }},
    {"softcap", Says::kWhat, [](const Reading& r) { r.described.desc.softcap = Float(r); }},
    {"mask", Says::kWhat, [](const Reading& r) { r.described.mask = Input("mask", r.value, r.described.place); }},
    {"alibi_slopes", Says::kWhat, [](const Reading& r) { r.described.alibi_slopes = Floats(r); }},
    {"sink_logits", Says::kWhat, [](const Reading& r) { r.described.sink_logits = Floats(r); }},
    {"precision", Says::kHow,
     [](const Reading& r) {
       r.given.precision = OneOrMany<sparge_precision>(
           r, [](const Reading& item) { return OneOf<sparge_precision>("precision", item.value, kPrecisions); });
     }},
    {"select", Says::kHow,
     [](const Reading& r) { r.given.select = OneOf<sparge_select>("select", r.value, kSelects); }},
    {"theta", Says::kHow, [](const Reading& r) { r.given.theta = OneOrMany<double>(r, Float); }},
    {"tau", Says::kHow, [](const Reading& r) { r.given.tau = OneOrMany<double>(r, Float); }},
    {"topk", Says::kHow, [](const Reading& r) { r.given.topk = OneOrMany<double>(r, Float); }},
    {"pv_skip", Says::kHow, [](const Reading& r) { r.given.pv_skip = OneOrMany<double>(r, PvSkip); }},
    {"predictor", Says::kHow,
     [](const Reading& r) { r.described.desc.predictor = OneOf<sparge_predictor>("predictor", r.value, kPredictors); }},
    {"keep_sink", Says::kWhat,
     [](const Reading& r) {
       r.described.desc.keep_sink = Bool(r);
       r.given.sink = true;
     }},
    {"dense_tail", Says::kHow, [](const Reading& r) { r.described.desc.dense_tail = Int(r); }},
    {"map", Says::kHow, [](const Reading& r) { r.described.map = Input("map", r.value, r.described.place); }},
    {"calibration", Says::kHow,
     [](const Reading& r) { r.described.calibration = Cast<std::shared_ptr<Calibration>>(r, "sparge.Calibration"); }},
    {"target_l1", Says::kHow, [](const Reading& r) { r.given.bounds.target_l1 = Float(r); }},
    {"pv_l1", Says::kHow, [](const Reading& r) { r.given.bounds.pv_l1 = Float(r); }},
    {"target_l2", Says::kHow, [](const Reading& r) { r.given.bounds.target_l2 = Float(r); }},
    {"pv_l2", Says::kHow, [](const Reading& r) { r.given.bounds.pv_l2 = Float(r); }},
    {"round_l1", Says::kHow, [](const Reading& r) { r.given.bounds.round_l1 = Float(r); }},
    {"seed", Says::kHow, [](const Reading& r) { r.given.seed = static_cast<uint64_t>(IntBetween(r, 0, INT64_MAX)); }},
    {"grid", Says::kWhat, ReadGrid},
    {"text_tokens", Says::kWhat, [](const Reading& r) { r.described.desc.text_tokens = Int(r); }},
    {"text_after", Says::kWhat, [](const Reading& r) { r.described.desc.text_after = Bool(r); }},
    {"q_offsets", Says::kWhat, [](const Reading& r) { r.described.q_offsets = Sequence<int64_t>(r, Int); }},
    {"kv_offsets", Says::kWhat, [](const Reading& r) { r.described.kv_offsets = Sequence<int64_t>(r, Int); }},
    // For sparge.distributed: where a part stands in the whole.
    {"first_query", Says::kWhat, [](const Reading& r) { r.described.desc.first_query = Int(r); }},
    {"all_queries", Says::kWhat, [](const Reading& r) { r.described.desc.all_queries = Int(r); }},
    {"first_key", Says::kWhat, [](const Reading& r) { r.described.desc.first_key = Int(r); }},
    {"all_keys", Says::kWhat, [](const Reading& r) { r.described.desc.all_keys = Int(r); }},
    {"stream", Says::kWhat,  // of GPUs; there it is taken out before
     [](const Reading& r) {
       RaiseValue("stream=" + Text(r.value) + ": q is not on a GPU, and others have no streams");
     }},
    {"threads", Says::kWhat, [](const Reading& r) { r.described.threads = CheckedThreads(Int(r)); }},
};

void ReadOption(nb::handle key, nb::handle value, Asker asker, Described& described, Given& given) {
  const std::string name = nb::cast<std::string>(key);
  const auto option = std::find_if(std::begin(kOptions), std::end(kOptions),
                                   [&](const Option& candidate) { return candidate.name == name; });
  if (option == std::end(kOptions)) RaiseType("unexpected keyword argument '" + name + "'");
  // None: as if it had not been given, except where it has a meaning of its own.
  if (value.is_none() && name != "pv_skip") return;
  if (asker == Asker::kLayer && option->says == Says::kHow) RaiseValue(name + " is the layer's to choose");
  option->read({described, given, option->name.data(), value});
}

void SetShapes(const TensorView& q, const TensorView& k, const TensorView* v, PlanDesc& desc) {
  const auto differ = [](const char* what, const char* a, int64_t x, const char* b, int64_t y) {
    if (x != y) {
      RaiseValue(std::string(a) + " has " + what + " " + std::to_string(x) + ", " + b + " has " + std::to_string(y));
    }
  };
  differ("batch", "k", k.shape[0], "q", q.shape[0]);
  differ("head size", "k", k.shape[3], "q", q.shape[3]);
  if (v != nullptr) {
    differ("batch", "v", v->shape[0], "q", q.shape[0]);
    differ("heads", "v", v->shape[1], "k", k.shape[1]);
    differ("tokens", "v", v->shape[2], "k", k.shape[2]);
  }
  desc.batch = q.shape[0];
  desc.q_heads = q.shape[1];
  desc.kv_heads = k.shape[1];
  desc.q_tokens = q.shape[2];
  desc.kv_tokens = k.shape[2];
  desc.qk_dim = q.shape[3];
  desc.v_dim = v != nullptr ? v->shape[3] : q.shape[3];
}

// Values for every head from one or q_heads of them.
template <class T>
std::vector<T> PerHead(const char* name, const std::optional<std::vector<T>>& given, T otherwise, int64_t heads) {
  if (!given) return std::vector<T>(static_cast<size_t>(heads), otherwise);
  if (given->size() == 1) return std::vector<T>(static_cast<size_t>(heads), given->front());
  if (static_cast<int64_t>(given->size()) != heads) {
    RaiseValue(std::string(name) + " has " + std::to_string(given->size()) + " values for " + std::to_string(heads) +
               " heads");
  }
  return *given;
}

template <class T>
bool Differs(const std::optional<std::vector<T>>& given) {
  return given && given->size() > 1;
}

void SetParameters(const Given& given, Described& described) {
  PlanDesc& desc = described.desc;
  const sparge_head_params d = desc.params;
  const auto first = [](const auto& list, double otherwise) {
    return list && !list->empty() ? list->front() : otherwise;
  };
  desc.params = {first(given.theta, d.theta), first(given.tau, d.tau), first(given.topk, d.topk),
                 first(given.pv_skip, d.pv_skip)};
  if (Differs(given.theta) || Differs(given.tau) || Differs(given.topk) || Differs(given.pv_skip)) {
    const auto theta = PerHead("theta", given.theta, d.theta, desc.q_heads);
    const auto tau = PerHead("tau", given.tau, d.tau, desc.q_heads);
    const auto topk = PerHead("topk", given.topk, d.topk, desc.q_heads);
    const auto skip = PerHead("pv_skip", given.pv_skip, d.pv_skip, desc.q_heads);
    for (size_t h = 0; h < theta.size(); ++h) described.heads.push_back({theta[h], tau[h], topk[h], skip[h]});
    desc.heads = described.heads.data();
  }
  if (Differs(given.precision)) {
    described.head_precision = PerHead("precision", given.precision, SPARGE_PRECISION_INT8, desc.q_heads);
    desc.head_precision = described.head_precision.data();
  } else if (given.precision && !given.precision->empty()) {
    desc.precision = given.precision->front();
  }
}

// Thresholds that a rule does not look at are refused.
void CheckThresholds(const Given& given, const PlanDesc& desc) {
  const bool dense = desc.select == SPARGE_SELECT_ALL || desc.select == SPARGE_SELECT_MAP;
  const bool by_tau = desc.select == SPARGE_SELECT_CDF || desc.select == SPARGE_SELECT_FLOOR;
  const struct {
    const char* name;
    bool without_effect;
  } checks[] = {{"theta", given.theta && dense},
                {"tau", given.tau && !by_tau},
                {"topk", given.topk && desc.select != SPARGE_SELECT_TOPK},
                {"predictor", desc.predictor != SPARGE_PREDICT_DEFAULT && dense},
                {"keep_sink", given.sink && dense}};
  for (const auto& check : checks) {
    if (check.without_effect) RaiseValue(std::string(check.name) + " has no effect on this way to select tiles");
  }
}

// Automatic unless thresholds or a map say otherwise. A bound of 0 is exact: nothing skipped, and fp32 unless told.
void SetSelection(Given& given, Described& described) {
  PlanDesc& desc = described.desc;
  const bool thresholds = given.theta || given.tau || given.topk || given.pv_skip;
  sparge_select automatic = SPARGE_SELECT_AUTO;
  if (described.map)
    automatic = SPARGE_SELECT_MAP;
  else if (given.topk)
    automatic = SPARGE_SELECT_TOPK;
  else if (given.tau)
    automatic = SPARGE_SELECT_FLOOR;
  desc.select = given.select.value_or(automatic);
  if (desc.select == SPARGE_SELECT_AUTO && given.exact() && !described.calibration) {
    const bool twice = given.bounds.target_l1 && given.bounds.target_l2;
    if (thresholds || twice || given.other_bounds()) {
      RaiseValue("a target of 0 is exact: no other bound or threshold has an effect");
    }
    desc.select = SPARGE_SELECT_ALL;
    given.pv_skip = {SPARGE_PV_SKIP_OFF};
    if (!given.precision) given.precision = {SPARGE_PRECISION_FP32};
    given.bounds = {};
    given.seed.reset();
  }
  const bool is_auto = desc.select == SPARGE_SELECT_AUTO;
  if (is_auto && thresholds) RaiseValue("theta, tau, topk and pv_skip have no effect on select='auto'");
  if (!is_auto && (given.has_bounds() || described.calibration)) {
    RaiseValue("target_l2, target_l1, pv_l2, pv_l1, round_l1, seed and calibration are for select='auto'");
  }
  CheckThresholds(given, desc);
  if (described.calibration && given.has_bounds()) {
    RaiseValue(
        "target_l2, target_l1, pv_l2, pv_l1, round_l1 and seed belong to the calibration: give them when it is made");
  }
  if (is_auto && !described.calibration) {
    CalibrationDesc bounds;
    bounds.q_heads = desc.q_heads;
    bounds.seed = given.seed.value_or(bounds.seed);
    SetBounds(given.bounds, bounds);
    described.calibration = std::make_shared<Calibration>(bounds);
  }
  desc.calibration = described.calibration ? described.calibration->get() : nullptr;
}

sparge_mask_type MaskType(const Array& input) {
  const nb::dlpack::dtype dtype = input.dtype;
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.bits == 8 && (code == nb::dlpack::dtype_code::Bool || code == nb::dlpack::dtype_code::UInt)) {
    return SPARGE_MASK_BOOL;
  }
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) return SPARGE_MASK_ADD_F32;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) return SPARGE_MASK_ADD_F16;
  RaiseType(std::string(input.name) + ": dtype " + DtypeText(dtype) + " is none of bool, uint8, float32, float16");
}

// Right-aligned, with ones that broadcast; the last `fixed` dimensions must be there in full.
std::array<int64_t, 4> BroadcastStrides(const Array& input, const std::array<int64_t, 4>& wanted, size_t fixed) {
  const size_t dims = input.dims();
  std::array<int64_t, 4> strides{};
  bool fits = dims >= 2 && dims <= 4;
  for (size_t i = 0; fits && i < dims; ++i) {
    const size_t at = i + 4 - dims;
    const bool whole = input.shape[i] == wanted[at];
    fits = whole || (input.shape[i] == 1 && at < 4 - fixed);
    strides[at] = whole && wanted[at] > 1 ? input.strides[i] : 0;
  }
  if (!fits) {
    RaiseValue(std::string(input.name) + ": shape " + input.ShapeText() + " does not fit " +
               ShapeText(wanted.data(), 4));
  }
  return strides;
}

void SetMask(Described& described) {
  if (!described.mask) return;
  if (!described.q_offsets.empty()) RaiseValue("mask: not for packed batches (q_offsets)");
  PlanDesc& d = described.desc;
  d.mask = MaskType(described.mask->array());
  const auto strides = BroadcastStrides(described.mask->array(), {d.batch, d.q_heads, d.q_tokens, d.kv_tokens}, 1);
  described.mask_view = {described.mask->array().data, strides[0], strides[1], strides[2]};
}

void SetMap(Described& described) {
  if (!described.map) return;
  if (!described.q_offsets.empty()) RaiseValue("map: not for packed batches (q_offsets)");
  if (described.desc.select != SPARGE_SELECT_MAP) RaiseValue("map is for select='map'");
  const PlanDesc& d = described.desc;
  if (MaskType(described.map->array()) != SPARGE_MASK_BOOL) RaiseType("map: its dtype is neither bool nor uint8");
  const auto blocks = [](int64_t tokens, int64_t size) { return (tokens + size - 1) / size; };
  const std::array<int64_t, 4> wanted{d.batch, d.q_heads, blocks(d.q_tokens, SPARGE_BLOCK_Q),
                                      blocks(d.kv_tokens, SPARGE_BLOCK_K)};
  const auto strides = BroadcastStrides(described.map->array(), wanted, 2);
  if (wanted[2] > 1 && strides[2] != wanted[3]) RaiseValue("map: its last two dimensions are not contiguous");
  described.map_batch_stride = strides[0];
  described.map_head_stride = strides[1];
}

void CheckCount(const char* name, size_t count, int64_t wanted) {
  if (count > 0 && static_cast<int64_t>(count) != wanted) {
    RaiseValue(std::string(name) + " has " + std::to_string(count) + " values, not " + std::to_string(wanted));
  }
}

void SetLists(Described& described) {
  PlanDesc& desc = described.desc;
  CheckCount("alibi_slopes", described.alibi_slopes.size(), desc.q_heads);
  CheckCount("sink_logits", described.sink_logits.size(), desc.q_heads);
  if (!described.alibi_slopes.empty()) desc.alibi_slopes = described.alibi_slopes.data();
  if (!described.sink_logits.empty()) desc.sink_logits = described.sink_logits.data();
  if (described.q_offsets.empty() && described.kv_offsets.empty()) return;
  // A packed batch: its tensors have no batch dimension, and the offsets say how many sequences there are.
  if (desc.batch != 1)
    RaiseValue("q_offsets: a packed batch has no batch dimension, q has " + std::to_string(desc.batch));
  if (described.q_offsets.size() < 2)
    RaiseValue("q_offsets has " + std::to_string(described.q_offsets.size()) + " values, not 2 or more");
  if (described.kv_offsets.size() != described.q_offsets.size()) {
    RaiseValue("kv_offsets has " + std::to_string(described.kv_offsets.size()) + " values, q_offsets " +
               std::to_string(described.q_offsets.size()));
  }
  desc.batch = static_cast<int64_t>(described.q_offsets.size()) - 1;
  desc.q_offsets = described.q_offsets.data();
  desc.kv_offsets = described.kv_offsets.data();
}

}  // namespace

Layout ReadLayout(nb::dict options) {
  const nb::object value = options.get("layout", nb::none());
  return value.is_none() ? Layout::kHeadsFirst : OneOf<Layout>("layout", value, kLayouts);
}

int32_t ReadPrecision(nb::handle name) {
  if (name.is_none()) return SPARGE_PRECISION_AUTO;
  return OneOf<sparge_precision>("precision", name, kPrecisions);
}

const char* NameOf(sparge_precision precision) { return NameIn<sparge_precision>(precision, kPrecisions); }
const char* NameOf(sparge_select select) { return NameIn<sparge_select>(select, kSelects); }

void ReadCall(const TensorView& q, const TensorView& k, const TensorView* v, nb::dict options, Asker asker,
              Described& described) {
  Given given;
  for (const auto& [key, value] : options) ReadOption(key, value, asker, described, given);
  SetShapes(q, k, v, described.desc);
  if (asker == Asker::kCaller) {
    SetSelection(given, described);
    SetParameters(given, described);
  }
  if (described.place.on_gpu() && described.threads != 0) {
    RaiseValue("threads=" + std::to_string(described.threads) + " has no effect on a GPU");
  }
  SetLists(described);
  SetMask(described);
  SetMap(described);
}

}  // namespace sparge::python

// Error bounds as Python names them: what is None is not named.
#ifndef SPARGE_PYTHON_SRC_BOUNDS_H_
#define SPARGE_PYTHON_SRC_BOUNDS_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <sparge/sparge.hpp>
#include <string>

namespace sparge::python {

struct GivenBounds {
  std::optional<double> target_l1, pv_l1, target_l2, pv_l2, round_l1;
};

// Into a descriptor that has bounds. The library takes a negative number for one that is not named; here it is refused.
template <class Desc>
void SetBounds(const GivenBounds& given, Desc& desc) {
  const auto set = [](const char* name, const std::optional<double>& bound, double& to) {
    if (!bound) return;
    if (*bound < 0) {
      throw nanobind::value_error((std::string(name) + "=" + std::to_string(*bound) + " is negative").c_str());
    }
    to = *bound;
  };
  set("target_l1", given.target_l1, desc.target_l1);
  set("pv_l1", given.pv_l1, desc.pv_l1);
  set("target_l2", given.target_l2, desc.target_l2);
  set("pv_l2", given.pv_l2, desc.pv_l2);
  set("round_l1", given.round_l1, desc.round_l1);
}

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_BOUNDS_H_

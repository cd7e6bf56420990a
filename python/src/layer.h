// Layers of models and presets for them, as classes of the extension module.
#ifndef SPARGE_PYTHON_SRC_LAYER_H_
#define SPARGE_PYTHON_SRC_LAYER_H_

#include <nanobind/nanobind.h>

#include <sparge/sparge.hpp>

namespace sparge::python {

void BindLayer(nanobind::module_& m);

// What is known of a head, by the names of sparge.HeadEstimate.
nanobind::dict DescribeHead(const HeadEstimate& estimate);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_LAYER_H_

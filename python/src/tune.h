// Recordings in memory and tuning, as parts of the extension module.
#ifndef SPARGE_PYTHON_SRC_TUNE_H_
#define SPARGE_PYTHON_SRC_TUNE_H_

#include <nanobind/nanobind.h>

namespace sparge::python {

void BindTune(nanobind::module_& m);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_TUNE_H_

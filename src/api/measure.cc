// The C names of measures.
#include <sparge/sparge.h>

#include "src/base/status.h"
#include "src/calibrate/bounds.h"

extern "C" const char* sparge_measure_name(sparge_measure measure) {
  return sparge::impl::MeasureName(sparge::impl::RawEnum(measure));
}

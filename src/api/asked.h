// What a client asks of those who decide by themselves how exactly it is computed: calibrations, layers and tuners.
#ifndef SPARGE_SRC_API_ASKED_H_
#define SPARGE_SRC_API_ASKED_H_

#include <sparge/sparge.h>

#include "src/calibrate/bounds.h"

namespace sparge::impl {

// Throws Failure if something that is the chooser's to choose ("layer", "tuner") is not as sparge_plan_desc_init left
// it.
void RefuseChoices(const sparge_plan_desc& desc, const char* chooser);
// What a descriptor bounds. Throws Failure if its members contradict each other.
Bounds BoundsOf(const sparge_calibration_desc& desc);
Bounds BoundsOf(const sparge_layer_desc& desc);
Bounds BoundsOf(const sparge_tuner_desc& desc);
// Throws Failure if it is a part of a call.
void RefuseParts(const sparge_plan_desc& desc, const char* taker);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_API_ASKED_H_

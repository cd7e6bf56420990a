// report.h - the figures of a run as JSON and as text, from one place so that both say the same.
#ifndef SPARGE_CLI_REPORT_H_
#define SPARGE_CLI_REPORT_H_

#include <nlohmann/json.hpp>
#include <sparge/sparge.hpp>
#include <string>

#include "cli/loaded_call.h"
#include "cli/text.h"

namespace sparge::cli {

using Json = nlohmann::ordered_json;  // keeps the order in which the figures are named

// 1 - QK tiles computed / eligible; 0 where nothing is eligible.
double Sparsity(const sparge_head_stats& stats);
double Work(const sparge_head_stats& stats);

// JSON has no infinity and no NaN: those become the texts "inf", "-inf" and "nan".
Json Number(double value);
// {eligible, computed} of QK and PV, sparsity, work.
void AddTiles(Json& json, const sparge_head_stats& stats);
// Precision, selection and thresholds, masks, scale: as they are in force. What does not apply is null.
void AddParameters(Json& json, const LoadedCall& call);
// All of it: what `sparge run --json` prints.
Json RunReport(const LoadedCall& call, const Stats& stats);

std::string Dump(const Json& json);                 // one object, indented, with a newline
std::string ParameterText(const LoadedCall& call);  // "int8, cdf tau 0.98 theta 0.3, pv-skip 10, causal"
// One line on which metadata of `file` became parameters; empty if none did.
std::string NotesText(const LoadedCall& call, const std::string& file);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_REPORT_H_

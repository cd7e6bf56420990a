// report_page.h - a report as one HTML page that needs nothing else: the page's template with the data put in.
#ifndef SPARGE_CLI_REPORT_PAGE_H_
#define SPARGE_CLI_REPORT_PAGE_H_

#include <optional>
#include <string>
#include <vector>

#include "cli/report.h"
#include "cli/report_head.h"
#include "cli/report_order.h"

namespace sparge::cli {

struct FileReport {
  std::string path;
  std::string title, layer, sample;  // from metadata and path; may be empty
  int64_t queries = 0, keys = 0;
  Json parameters;
  std::string swept;  // SweptParameter
  std::vector<HeadReport> heads;
  std::optional<OrderReport> order;
};

// A page holds the pictures of at most so many heads, so that 30 layers stay a file that a browser likes.
inline constexpr size_t kMostPictured = 64;
// Of these, so many are the heads with the largest error; the others are spread evenly over the rest.
inline constexpr size_t kWorstPictured = 16;

// Which of the heads get pictures, given their errors. Not a number counts as the largest.
std::vector<bool> ChoosePictured(const std::vector<double>& errors);

// All figures, as `--json` prints them and as the page holds them, there with the pictures.
Json ReportJson(const Context& context, const std::vector<FileReport>& files, bool with_pictures);
std::string ReportPage(const Json& data);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_REPORT_PAGE_H_

// Sums over measured rows, and the estimate of a head's error that follows from them.
//
// The error of a head is a ratio, sum of errors / sum of sizes over its rows. Rows of one call are compared with rows
// of that call only: sizes and errors count in units of the call's mean size, so that a call with large outputs does
// not outvote one with small ones.
#ifndef SPARGE_SRC_CALIBRATE_SUMS_H_
#define SPARGE_SRC_CALIBRATE_SUMS_H_

namespace sparge::impl {

// Of the sizes of rows; shared by all choices of a head. `2` are squares.
struct SizeSums {
  double count = 0, size = 0, size2 = 0;

  void Add(double row_size) {
    count += 1;
    size += row_size;
    size2 += row_size * row_size;
  }
};
// What a row has under one choice.
struct RowError {
  double error, size, cost;
  bool skips;  // something is left out: else it has no error whatever the choice is worth
};
// Of the errors of rows under one choice; `cross` is error * size, `skipping` the rows that skip.
struct ErrorSums {
  double error = 0, error2 = 0, cross = 0, cost = 0, skipping = 0;

  void AddRow(const RowError& row) {
    error += row.error;
    error2 += row.error * row.error;
    cross += row.error * row.size;
    cost += row.cost;
    skipping += row.skips ? 1 : 0;
  }
  void Add(const ErrorSums& other) {
    error += other.error;
    error2 += other.error2;
    cross += other.cross;
    cost += other.cost;
    skipping += other.skipping;
  }
};

// The call at hand as it was measured, and the calls before it in units of their sizes. Of those also how many they are
// and, to tell how much calls differ, the sums of squares of their numbers of rows.
struct SizeHistory {
  SizeSums now, past;
  double calls = 0, calls2 = 0;

  double Rows() const { return past.count + now.count; }
  double Unit() const { return now.size > 0 ? now.count / now.size : 1.0; }
  SizeSums All() const;
  // The call at hand becomes one of many; after the errors that belong to it.
  void Close();
  void Fade(double by);
};
// The errors of the calls before, under one choice.
struct ErrorPast {
  ErrorSums sums;
  double calls2 = 0, calls_cross = 0;  // squares of errors per call; errors * rows

  void Close(const SizeHistory& sizes, const ErrorSums& now);
  void Fade(double by);
};
// Those of all calls under one choice.
struct Errors {
  const ErrorPast& past;
  ErrorSums now;

  double Cost() const { return past.sums.cost + now.cost; }
  double Skipping() const { return past.sums.skipping + now.skipping; }
};

struct Estimate {
  double value;   // the ratio
  double error;   // its standard error
  double spread;  // its standard deviation from call to call; 0 while there is one
  double calls;   // that it is over; older ones count less
};
// Of plain sums; of all calls; of the calls before the one at hand; of the one at hand.
Estimate EstimateOne(const SizeSums& sizes, const ErrorSums& errors);
Estimate EstimateAll(const SizeHistory& sizes, const Errors& errors);
// Its value alone, for a first look.
double ValueOfAll(const SizeHistory& sizes, const Errors& errors);
Estimate EstimatePast(const SizeHistory& sizes, const Errors& errors);
Estimate EstimateNow(const SizeHistory& sizes, const Errors& errors);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CALIBRATE_SUMS_H_

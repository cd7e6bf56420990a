/* sparge_mpi.h - attention over the ranks of an MPI communicator, each of which has a part of the sequence, with the
 * tiles that one rank would compute (docs/distributed.md). The library is libsparge_mpi, built with SPARGE_MPI=ON.
 *
 * Use: make a group of a communicator, run it as often as you like, destroy it; all ranks do so, in the same order. MPI
 * is only called by the thread that calls, while another one computes: MPI_THREAD_FUNNELED and the main thread will do.
 *
 * A rank that is stopped or missing is SPARGE_RANK_LOST on all others. MPI cannot go on without it: all that a program
 * can do then is to say so and call MPI_Abort; MPI_Finalize would wait for ever.
 */
#ifndef SPARGE_SPARGE_MPI_H_
#define SPARGE_SPARGE_MPI_H_

#include <mpi.h>
#include <sparge/sparge.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Detail of this thread's last failed call of this header: one line. What ranks refuse together has the same text on
 * all of them. Empty if none failed. */
SPARGE_API const char* sparge_mpi_last_error(void);

/* ------------------------------------------------------------------ who has which tokens */

typedef enum sparge_mpi_shard {
  SPARGE_MPI_CONTIGUOUS = 0,
  /* A piece of the first half of the sequence and its counterpart of the second half: under a causal mask early queries
   * see few keys and late ones many, and so all ranks have about as much to do. */
  SPARGE_MPI_ZIGZAG = 1
} sparge_mpi_shard;

/* Tokens [first, first + count) of the whole sequence. */
typedef struct sparge_mpi_segment {
  int64_t first, count;
} sparge_mpi_segment;

/* The tokens of a rank, in ascending order: whole blocks of SPARGE_BLOCK_Q, but for the end of the sequence. Returns
 * how many segments they are: 0 (fewer blocks than ranks), 1 or 2; -1 if there is no such part. */
SPARGE_API int32_t sparge_mpi_segments(int64_t tokens, int32_t rank, int32_t ranks, sparge_mpi_shard shard,
                                       sparge_mpi_segment segments[2]);

/* ------------------------------------------------------------------ group */

typedef struct sparge_mpi sparge_mpi;

typedef struct sparge_mpi_desc {
  size_t struct_size;
  sparge_mpi_shard shard; /* CONTIGUOUS */
  double timeout_s;       /* 60: how long a rank may be silent, or elsewhere, while others wait for it */
} sparge_mpi_desc;

SPARGE_API void sparge_mpi_desc_init_sized(sparge_mpi_desc* desc, size_t size);
static inline void sparge_mpi_desc_init(sparge_mpi_desc* desc) { sparge_mpi_desc_init_sized(desc, sizeof(*desc)); }

/* `comm` serves this group alone until that is destroyed: give it one of MPI_Comm_dup, and free that afterwards. Its
 * errors are returned from now on (MPI_ERRORS_RETURN). Waits for nobody. `desc` may be NULL: all defaults. */
SPARGE_API sparge_status sparge_mpi_create(MPI_Comm comm, const sparge_mpi_desc* desc, sparge_mpi** out);
/* Waits until all ranks do the same, at most for the timeout: so `comm` has no message left. NULL is allowed. After
 * SPARGE_RANK_LOST it waits for nobody, and memory that messages may still use is not freed. */
SPARGE_API void sparge_mpi_destroy(sparge_mpi* group);
/* The rank that SPARGE_RANK_LOST spoke of, -1 if none: the group is of no use any more. */
SPARGE_API int32_t sparge_mpi_lost_rank(const sparge_mpi* group);

/* ------------------------------------------------------------------ run */

typedef struct sparge_mpi_stats {
  size_t struct_size;
  int64_t bytes_sent; /* by this rank */
  double waited_ms;   /* for messages, with nothing to compute */
  /* Parts of the keys that came from another rank; of these, those that were here before what was computed meanwhile
   * was done. */
  int64_t parts, parts_in_time;
} sparge_mpi_stats;
SPARGE_API void sparge_mpi_stats_init_sized(sparge_mpi_stats* stats, size_t size);
static inline void sparge_mpi_stats_init(sparge_mpi_stats* stats) {
  sparge_mpi_stats_init_sized(stats, sizeof(*stats));
}

/* As sparge_run over all ranks together. `desc` says what is asked of the whole, and is the same on all ranks; the
 * tensors of `args` have this rank's tokens (of sparge_mpi_segments), one segment behind the other, and so have lse,
 * map_out (its rows; all columns of the whole), stats and head_stats. Keys and values travel in a ring, each part while
 * another one is computed. stats: NULL = not wanted.
 *
 * Taken: SPARGE_SELECT_ALL, and SPARGE_SELECT_FLOOR with its default predictor for more than SPARGE_FEW_QUERIES
 * queries. Refused: the other selections (a calibration does not see all keys), masks, maps, packed batches, grids,
 * caches, parts, and a workspace: the call makes its own. Contexts are those of a CPU.
 *
 * Whatever ranks ask for is compared before anything is computed: where one differs or is refused, all return
 * SPARGE_INVALID_ARGUMENT with the same text, and the group goes on. A rank that fails later, or is lost, is
 * SPARGE_RANK_LOST on the others, at most two seconds after the timeout and never in the middle of a part: who computes
 * finishes that first. Outputs are then undefined. */
SPARGE_API sparge_status sparge_mpi_run(sparge_mpi* group, sparge_context* context, const sparge_plan_desc* desc,
                                        const sparge_run_args* args, sparge_mpi_stats* stats);

#ifdef __cplusplus
}
#endif
#endif /* SPARGE_SPARGE_MPI_H_ */

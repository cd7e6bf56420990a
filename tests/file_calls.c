/* file_calls.c - preloaded into a program: writes its calls of fsync, link and rename into the file that the
 * environment names as SPARGE_CALLS, and lets the n-th call of one of them fail with EIO: SPARGE_FAIL=rename:2. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* 1 if this call is to fail. */
static int note(const char* call, const char* what, const char* other) {
  static int counts[128]; /* by the first letter of the call */
  const int count = ++counts[(int)call[0]];
  const char* const log = getenv("SPARGE_CALLS");
  if (log != NULL) {
    const int file = open(log, O_WRONLY | O_CREAT | O_APPEND, 0666);
    dprintf(file, "%s %s%s%s\n", call, what, *other != '\0' ? " " : "", other);
    close(file);
  }
  const char* const fail = getenv("SPARGE_FAIL");
  if (fail == NULL || strncmp(fail, call, strlen(call)) != 0 || fail[strlen(call)] != ':') return 0;
  if (atoi(fail + strlen(call) + 1) != count) return 0;
  errno = EIO;
  return 1;
}

int fsync(int descriptor) {
  char link_name[64], path[4096] = "";
  snprintf(link_name, sizeof link_name, "/proc/self/fd/%d", descriptor);
  if (readlink(link_name, path, sizeof path - 1) < 0) strcpy(path, "?");
  return note("fsync", path, "") ? -1 : (int)syscall(SYS_fsync, descriptor);
}

int link(const char* from, const char* to) {
  return note("link", from, to) ? -1 : (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int rename(const char* from, const char* to) {
  return note("rename", from, to) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

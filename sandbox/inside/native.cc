// What surrounds a command, in machine code: `native.py` says what each function is for. Commands are started by vfork
// and waited for with as few system calls and as little memory touched as can be, because an emulated processor pays
// for both.

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int kStreams = 3;
constexpr int kNotFound = 127, kNotExecutable = 126;
constexpr size_t kFirstBytes = 1 << 16;
constexpr size_t kPathBytes = 4096;

constexpr uint32_t kNoJson = 0xFFFFFFFF;
constexpr char kReady = '.';
enum { kOther, kRunning, kEnded };

// As `command.REPORT`.
struct __attribute__((packed)) Report {
  uint8_t stays;
  int32_t code;
  double cpu_s;
  double buried_s;
};

// A message, and the descriptors that came with it.
struct Message {
  char *data;
  uint32_t size;
  int descriptors[kStreams];
  int count;
};

struct Command {
  char *directory;
  char **argv;
  char **environment;
  const char *path;
  char **words;  // to be freed
};

double seconds(const rusage &used) {
  return used.ru_utime.tv_sec + used.ru_stime.tv_sec + 1e-6 * (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

bool read_all(int from, char *to, size_t size) {
  while (size > 0) {
    ssize_t got = read(from, to, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    size -= got;
  }
  return true;
}

// Ends the process where it cannot: of half an answer the rest would be the next one's.
void write_all(int to, const char *data, size_t size) {
  while (size > 0) {
    ssize_t done = write(to, data, size);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) _exit(1);
    data += done;
    size -= done;
  }
}

// The next message; false where there is none, or none that is whole. `first` has room for all but the longest ones.
bool receive(int channel, char *first, Message *message) {
  alignas(cmsghdr) char told[CMSG_SPACE(kStreams * sizeof(int))];
  iovec part = {first, kFirstBytes};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = told;
  header.msg_controllen = CMSG_LEN(kStreams * sizeof(int));  // all of `told` has room for a fourth
  ssize_t got;
  do got = recvmsg(channel, &header, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  message->count = 0;
  if (got <= 0 || header.msg_flags & MSG_CTRUNC) return false;
  for (cmsghdr *rights = CMSG_FIRSTHDR(&header); rights; rights = CMSG_NXTHDR(&header, rights)) {
    message->count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(message->descriptors, CMSG_DATA(rights), message->count * sizeof(int));
  }
  size_t have = got;
  if (have < sizeof message->size) {
    if (!read_all(channel, first + have, sizeof message->size - have)) return false;
    have = sizeof message->size;
  }
  memcpy(&message->size, first, sizeof message->size);
  have -= sizeof message->size;
  message->data = first + sizeof message->size;
  if (message->size > kFirstBytes - sizeof message->size) {
    message->data = static_cast<char *>(malloc(message->size));
    if (!message->data) return false;
    memcpy(message->data, first + sizeof message->size, have);
  }
  return have <= message->size && read_all(channel, message->data + have, message->size - have);
}

// u32 arguments | u32 strings | the strings, each with a NUL behind it: directory, arguments, environment.
// False where the strings are not so many; `command->argv[0]` is there all the same.
bool parse(char *data, uint32_t size, Command *command) {
  static char nothing[1] = "";
  static char *none[] = {nothing, nullptr};
  *command = {nothing, none, none + 1, nullptr, nullptr};
  uint32_t arguments, strings, found = 0;
  if (size < 10 || data[size - 1] != 0) return false;
  memcpy(&arguments, data, 4);
  memcpy(&strings, data + 4, 4);
  char *end = data + size;
  data += 8;
  for (const char *at = data; at < end; ++at) found += *at == 0;
  char **words = command->words = static_cast<char **>(malloc((found + 1ull) * sizeof(char *)));
  if (!words) _exit(1);  // no doing of the command's
  command->directory = data;
  for (uint32_t i = 0; (data += strlen(data) + 1) < end; ++i) {
    words[i < arguments ? i : i + 1] = data;
    if (i >= arguments && strncmp(data, "PATH=", 5) == 0) command->path = data + 5;
  }
  if (found != strings || arguments < 1 || arguments >= found) {
    if (arguments >= 1 && found >= 2) {
      words[1] = nullptr;
      command->argv = words;
    }
    return false;
  }
  words[arguments] = words[found] = nullptr;
  command->argv = words;
  command->environment = words + arguments + 1;
  return true;
}

// Becomes the program, which is looked for as posix_spawnp does; returns why not.
int become(const Command &command) {
  const char *name = command.argv[0];
  size_t length = strlen(name);
  if (length == 0) return ENOENT;
  if (strchr(name, '/') || !command.path) {
    execve(name, command.argv, command.environment);
    return errno;
  }
  if (length > NAME_MAX) return ENAMETOOLONG;
  bool is_refused = false;
  char place[kPathBytes];
  for (const char *start = command.path, *end;; start = end + 1) {
    end = strchrnul(start, ':');
    size_t before = end - start;
    if (before + length + 2 <= sizeof place) {
      memcpy(place, start, before);
      if (before > 0) place[before++] = '/';
      memcpy(place + before, name, length + 1);
      execve(place, command.argv, command.environment);
      if (errno == EACCES) is_refused = true;
      else if (errno != ENOENT && errno != ENOTDIR && errno != ESTALE && errno != ENODEV && errno != ETIMEDOUT)
        return errno;
    }
    if (!*end) return is_refused ? EACCES : ENOENT;
  }
}

// Starts the program in a session of its own; 0, or why it could not be.
int spawn(const Command &command, const Message &message, pid_t *pid) {
  if (chdir(command.directory) != 0) return errno;
  volatile int reason = 0;  // the child shares this memory until it is another program
  *pid = vfork();
  if (*pid == 0) {
    int first = kStreams - message.count;
    bool is_ready = setsid() >= 0;
    if (is_ready && first > 0) {
      int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
      is_ready = null >= 0 && dup2(null, 0) == 0;
    }
    for (int i = 0; is_ready && i < message.count; ++i) is_ready = dup2(message.descriptors[i], first + i) >= 0;
    reason = is_ready ? become(command) : errno;
    _exit(kNotFound);
  }
  if (*pid < 0) return errno;
  if (reason) waitpid(*pid, nullptr, 0);
  return reason;
}

// Runs the command, ends and buries all that it has left, and says what came of it.
void run(int channel, const Message &message, bool stays) {
  Report report = {stays, kNotExecutable, 0.0, 0.0};
  Command command;
  pid_t pid = -1;
  int reason = parse(message.data + 1, message.size - 1, &command) ? spawn(command, message, &pid) : EINVAL;
  if (reason) {
    if (reason == ENOENT || reason == ENOTDIR) report.code = kNotFound;
    int to = message.descriptors[message.count - 1];
    write_all(to, command.argv[0], strlen(command.argv[0]));
    write_all(to, ": ", 2);
    const char *text = strerror(reason);
    write_all(to, text, strlen(text));
    write_all(to, "\n", 1);
  } else {
    int status;
    rusage used;
    for (pid_t done = 0; done != pid;) {
      done = wait4(-1, &status, 0, &used);
      if (done < 0 && errno != EINTR) _exit(1);
    }
    report.code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    report.cpu_s = seconds(used);
  }
  kill(-1, SIGKILL);
  while (wait4(-1, nullptr, 0, nullptr) > 0 || errno == EINTR) {
  }
  rusage buried;
  getrusage(RUSAGE_CHILDREN, &buried);
  report.buried_s = seconds(buried);
  if (chdir("/") != 0) _exit(1);
  write_all(channel, reinterpret_cast<char *>(&report), sizeof report);
  free(command.words);
}

// What the agent has at hand when it waits for a command, and how far that has come. As `native.Round`.
struct Round {
  int control, channel, upper, events;
  int is_ready;      // whether the process at the channel has said so
  int room;          // bytes of each stream that are read at most
  double short_s;    // after which a command is a long one
  double buried_s;   // computing time of all that the process has buried
  int streams[2];    // of the command, for reading
  int sizes[3];      // what has been read of the channel and of the streams
  uint32_t size;     // of the host's message
  uint32_t have;     // bytes of it that have been read
  double start_s;
};

// What stands before a command in the host's message: `frames.py`.
struct __attribute__((packed)) Asked {
  uint32_t no_json;
  uint64_t question;
  double wall_s;
  uint32_t input_bytes;
};

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

// Ends for reading, which never have this process wait, then those for writing.
bool make_pipes(int *pipes) {
  int output[2], errors[2];
  if (pipe2(output, O_CLOEXEC) != 0) return false;
  if (pipe2(errors, O_CLOEXEC) != 0) {
    close(output[0]);
    close(output[1]);
    return false;
  }
  fcntl(output[0], F_SETFL, O_NONBLOCK);
  fcntl(errors[0], F_SETFL, O_NONBLOCK);
  pipes[0] = output[0], pipes[1] = errors[0], pipes[2] = output[1], pipes[3] = errors[1];
  return true;
}

// Gives a process a command; false where it is gone, or is from now on because it was given half of one.
bool give(int channel, char *program, uint32_t size, const int *pipes) {
  struct __attribute__((packed)) {
    uint32_t size;
    char kind;
  } head = {size + 1, 'x'};
  iovec parts[2] = {{&head, sizeof head}, {program, size}};
  alignas(cmsghdr) char told[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = parts;
  header.msg_iovlen = 2;
  header.msg_control = told;
  header.msg_controllen = sizeof told;
  cmsghdr *rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(2 * sizeof(int));
  memcpy(CMSG_DATA(rights), pipes + 2, 2 * sizeof(int));
  ssize_t sent = sendmsg(channel, &header, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(sizeof head + size)) return true;
  if (sent > 0) shutdown(channel, SHUT_RDWR);
  return false;
}

// Reads what a command's process and the command say, until its end has been reported and all has been read: then true.
bool follow(Round *round, int wanted, double end_s, char *bytes) {
  pollfd polled[4];
  int watched[4] = {round->channel, round->streams[0], round->streams[1], round->control};
  for (int i = 0; i < 4; ++i) polled[i] = {watched[i], POLLIN, 0};
  for (int &size : round->sizes) size = 0;
  for (;;) {
    double left_s = end_s - now_s();
    if (left_s <= 0) return false;  // also where there is always something to read
    int found = poll(polled, 4, static_cast<int>(1000 * left_s) + 1);
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) return false;
    if (polled[0].revents) {
      ssize_t got = recv(round->channel, bytes + round->sizes[0], wanted - round->sizes[0], MSG_DONTWAIT);
      if (got <= 0) return false;
      round->sizes[0] += got;
    }
    bool has_reported = round->sizes[0] == wanted;
    for (int i = 1; i < 3; ++i) {
      if (polled[i].fd < 0 || !(polled[i].revents || has_reported)) continue;
      ssize_t got;
      do {
        if (round->sizes[i] == round->room) return false;
        got = read(polled[i].fd, bytes + i * kFirstBytes + round->sizes[i], round->room - round->sizes[i]);
        if (got > 0) round->sizes[i] += got;
      } while (got > 0 && has_reported);  // before that, one who writes without end would have nothing else looked at
      if (got < 0 && errno != EAGAIN) return false;
      if (got == 0) polled[i].fd = -1;
    }
    if (has_reported) return true;
    if (polled[3].revents) return false;
  }
}

bool is_full(int upper) {
  struct statvfs room;
  if (fstatvfs(upper, &room) != 0) _exit(1);
  return room.f_bavail < 1 || room.f_favail < 1;
}

long oom_kills(int events) {
  char text[4096];
  ssize_t got = pread(events, text, sizeof text - 1, 0);
  if (got < 0) _exit(1);
  text[got] = 0;
  const char *found = strstr(text, "\noom_kill ");
  return found ? atol(found + strlen("\noom_kill ")) : 0;
}

// Says of a command what `agent.Agent` says of it.
void answer(const Round &round, unsigned long long question, const Report &report, const char *bytes) {
  static char message[3 * kFirstBytes];
  char ooms[40] = "";
  if (round.events >= 0) snprintf(ooms, sizeof ooms, "\"ooms\": %ld, ", oom_kills(round.events));
  uint32_t lengths[2];
  char *text = message + sizeof lengths;
  lengths[1] = snprintf(
      text, kFirstBytes,
      "{\"id\": %llu, \"code\": 0, \"cpu_s\": 0.0, \"is_over\": false, \"seconds\": %.9f, \"is_full\": %s, %s"
      "\"stdout_bytes\": %d, \"stderr_bytes\": %d, \"leader\": %d, \"leader_cpu_s\": %.6f, \"blobs\": [%d, %d]}",
      question, now_s() - round.start_s, is_full(round.upper) ? "true" : "false", ooms, round.sizes[1], round.sizes[2],
      report.code, report.cpu_s, round.sizes[1], round.sizes[2]);
  char *end = text + lengths[1];
  for (int i = 1; i < 3; ++i) end = static_cast<char *>(mempcpy(end, bytes + i * kFirstBytes, round.sizes[i]));
  lengths[0] = end - message - sizeof lengths[0];
  memcpy(message, lengths, sizeof lengths);
  write_all(round.control, message, end - message);
}

}  // namespace

extern "C" {

int64_t lead(int channel, int uses, double most_cpu_s, char **call) {
  static char first[kFirstBytes];
  double own_cpu_s = 0.0;
  for (int left = uses - 1; left >= 0; --left) {
    Message message;
    if (!receive(channel, first, &message)) _exit(0);
    if (message.size == 0) _exit(1);
    if (message.data[0] != 'x') {
      *call = message.data;
      return message.size;
    }
    if (message.count < 2) _exit(1);
    bool stays = left > 0 && own_cpu_s < most_cpu_s;
    run(channel, message, stays);
    for (int i = 0; i < message.count; ++i) close(message.descriptors[i]);
    if (message.data != first + sizeof message.size) free(message.data);
    if (!stays) return 0;
    rusage own;
    getrusage(RUSAGE_SELF, &own);
    own_cpu_s = seconds(own);
  }
  return 0;
}

int attend(Round *round, char *frame, char *bytes) {
  static int pipes[4] = {-1, -1, -1, -1};
  for (;;) {
    bool has_pipes = pipes[0] >= 0 || make_pipes(pipes);
    uint32_t head[2];
    if (!read_all(round->control, reinterpret_cast<char *>(head), sizeof head)) _exit(0);
    round->size = head[0];
    round->have = sizeof head[1];
    memcpy(frame, &head[1], sizeof head[1]);
    if (head[1] != kNoJson || head[0] < sizeof(Asked) || head[0] > kFirstBytes || !has_pipes) return kOther;
    if (!read_all(round->control, frame + round->have, round->size - round->have)) _exit(0);
    round->have = round->size;
    Asked asked;
    memcpy(&asked, frame, sizeof asked);
    round->start_s = now_s();
    if (asked.input_bytes > 0) return kOther;
    if (!give(round->channel, frame + sizeof asked, round->size - sizeof asked, pipes)) return kOther;
    memcpy(round->streams, pipes, sizeof round->streams);
    close(pipes[2]);
    close(pipes[3]);
    pipes[0] = -1;
    int wanted = sizeof(Report) + !round->is_ready;
    double end_s = round->start_s + (asked.wall_s < round->short_s ? asked.wall_s : round->short_s);
    if (!follow(round, wanted, end_s, bytes)) return kRunning;
    if (!round->is_ready && *bytes != kReady) return kRunning;
    round->is_ready = true;
    Report report;
    memcpy(&report, bytes + wanted - sizeof report, sizeof report);
    round->buried_s = report.buried_s;
    answer(*round, asked.question, report, bytes);
    close(round->streams[0]);
    close(round->streams[1]);
    if (!report.stays) return kEnded;
  }
}
}

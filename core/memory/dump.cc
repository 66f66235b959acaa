// See dump.h. The signal's handler only writes to a pipe, on which a thread of ours waits.
#include "memory/dump.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "base/fd.h"
#include "memory/heap.h"
#include "memory/recorder.h"

namespace unisono {
namespace {

std::string& folder = *new std::string;
// Counts the files that this process has begun to write, so that each has a name of its own until it is whole: threads
// write at the same time when two groups fail, or a signal comes. Relaxed: it hands out numbers.
std::atomic<uint64_t> files_begun{0};
int signal_pipe[2] = {-1, -1};
pid_t signal_owner = 0;

// Builds one JSON value from left to right.
class Json {
 public:
  Json& key(const char* name) {
    comma();
    text(name);
    out_ += ": ";
    fresh_ = true;
    return *this;
  }
  Json& open(char bracket) {
    comma();
    out_ += bracket;
    fresh_ = true;
    return *this;
  }
  Json& close(char bracket) {
    out_ += bracket;
    fresh_ = false;
    return *this;
  }
  Json& number(int64_t n) {
    comma();
    out_ += std::to_string(n);
    return *this;
  }
  Json& hex(uint64_t n) {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%016lx", static_cast<unsigned long>(n));
    return string(digits);
  }
  Json& string(const std::string& s) {
    comma();
    text(s);
    return *this;
  }
  Json& truth(bool b) {
    comma();
    out_ += b ? "true" : "false";
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  void comma() {
    if (!fresh_) out_ += ", ";
    fresh_ = false;
  }
  // Names come out of shared memory: what is not plain text is written as a number, so that every reader copes.
  void text(const std::string& s) {
    out_ += '"';
    for (const char c : s) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        out_ += '\\';
        out_ += c;
      } else if (byte < 0x20 || byte >= 0x7f) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
        out_ += escaped;
      } else {
        out_ += c;
      }
    }
    out_ += '"';
  }
  std::string out_;
  bool fresh_ = true;
};

void write_group(Json& j, const ReadGroup& g, int64_t wall) {
  j.open('{').key("name").string(g.name()).key("id").hex(g.words.id).key("open").truth(g.open);
  j.key("rank").number(g.words.rank).key("size").number(g.words.size);
  j.key("opened_ns").number(wrapped_sum(g.words.opened_ns, wall));
  j.key("pids").open('[');
  for (int r = 0; r < g.words.size; r++) j.number(g.words.pids[r]);
  j.close(']').key("tokens").open('[');
  for (int r = 0; r < g.words.size; r++) j.hex(g.words.tokens[r]);
  j.close(']');
  j.key("calls").number(static_cast<int64_t>(g.calls)).key("bytes").number(static_cast<int64_t>(g.bytes));
  j.key("queued").number(static_cast<int64_t>(g.queued));
  j.key("messages").number(static_cast<int64_t>(g.messages));
  j.key("message_bytes").number(static_cast<int64_t>(g.message_bytes)).close('}');
}

void write_operation(Json& j, const ReadOperation& o, int64_t wall) {
  j.open('{').key("number").number(static_cast<int64_t>(o.number)).key("op").string(verb_name(o.verb));
  j.key("seq").number(static_cast<int64_t>(o.seq)).key("group").string(o.group).key("group_id").hex(o.group_id);
  j.key("state").string(state_name(o.state)).key("dtype").string(dtype_name(o.dtype));
  j.key("element_bytes").number(static_cast<int64_t>(dtype_bytes(o.dtype)));
  if (o.op != RedOp::none) j.key("reduce").string(redop_name(o.op));
  j.key("count").number(static_cast<int64_t>(o.count)).key("root").number(o.root).key("tag").number(o.tag);
  for (const auto* splits : {&o.in_splits, &o.out_splits}) {
    if (splits->empty()) continue;
    j.key(splits == &o.in_splits ? "in_splits" : "out_splits").open('[');
    for (uint64_t count : *splits) j.number(static_cast<int64_t>(count));
    j.close(']');
  }
  j.key("began_ns").number(wrapped_sum(o.began_ns, wall));
  j.key("ended_ns").number(o.ended_ns ? wrapped_sum(o.ended_ns, wall) : 0);
  j.key("async").truth(o.asynchronous).key("site").string(o.site).close('}');
}

void write_wait(Json& j, const ReadWaiting& read, int64_t now, int64_t wall) {
  constexpr const char* kinds[] = {"callers", "data", "message", "ticket"};
  static_assert(std::size(kinds) == static_cast<size_t>(WaitFor::count_));
  const Waiting& w = read.what;
  j.open('{').key("op").string(verb_name(w.verb)).key("seq").number(static_cast<int64_t>(w.seq));
  j.key("group").string(w.group).key("group_id").hex(w.group_id);
  j.key("for").string(kinds[static_cast<size_t>(w.what)]);
  j.key("ranks").open('[');
  for (int r = 0; r < 256; r++)
    if (w.owes(r)) j.number(r);
  j.close(']');
  j.key("peer").number(w.peer).key("tag").number(w.tag);
  j.key("since_ns").number(wrapped_sum(w.since_ns, wall));
  j.key("waited_ns").number(wrapped_difference(now, w.since_ns));
  j.key("site").string(w.site).close('}');
}

void handle_signal(int) {
  const int kept = errno;
  if (getpid() == signal_owner) {  // in a forked child the thread is not there
    const char byte = 1;
    [[maybe_unused]] ssize_t written = write(signal_pipe[1], &byte, 1);
  }
  errno = kept;
}

void serve_signals() {
  char byte;
  for (;;) {
    const ssize_t got = read(signal_pipe[0], &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1) return;
    Failure failure;
    if (auto heap = process_heap(failure)) dump_record(heap->base(), "signal");
  }
}

}  // namespace

std::string record_as_json(const std::byte* heap_base, const std::string& why, size_t most) {
  const RecorderHeader header = read_recorder_header(heap_base);
  const int64_t wall = header.wall_minus_ns, now = now_ns();
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  Json j;
  j.open('{').key("unisono_trace").number(1).key("host").string(host).key("pid").number(header.pid);
  j.key("token").hex(read_token(heap_base).a).key("why").string(why).key("written_ns").number(wrapped_sum(now, wall));
  j.key("groups").open('[');
  for (const ReadGroup& g : read_groups(heap_base)) write_group(j, g, wall);
  j.close(']').key("waits").open('[');
  for (const ReadWaiting& w : read_waiting(heap_base)) write_wait(j, w, now, wall);
  j.close(']').key("operations").open('[');
  const std::vector<ReadOperation> all = read_operations(heap_base);
  for (size_t i = all.size() - std::min(all.size(), most); i < all.size(); i++) write_operation(j, all[i], wall);
  j.close(']').close('}');
  return j.take();
}

std::string record_of_file(int fd, const std::string& why, size_t most) {
  constexpr size_t bytes = RecorderLayout::end;
  // Read, not mapped: a hole of the file would be filled by a look at it.
  std::unique_ptr<std::byte, decltype(&free)> copy(static_cast<std::byte*>(aligned_alloc(4096, bytes)), &free);
  if (!copy) return "";
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = pread(fd, copy.get() + at, bytes - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return "";
    at += static_cast<size_t>(got);
  }
  const auto* header = reinterpret_cast<const HeapHeader*>(copy.get());
  if (header->magic != HeapHeader::kMagic || header->layout != kLayoutVersion) return "";
  return record_as_json(copy.get(), why, most);
}

void set_trace_folder(const std::string& named) {
  folder = named;
}

bool has_trace_folder() {
  return !folder.empty();
}

void dump_record(const std::byte* heap_base, const std::string& why) {
  if (folder.empty()) return;
  const std::string text = record_as_json(heap_base, why);
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  for (char& c : host)
    if (c == '/') c = '_';
  const std::string name =
      folder + "/unisono-" + host + "-" + std::to_string(read_recorder_header(heap_base).pid) + ".json";
  // Ranks, and threads of one, may write about the same process at the same time. The last to rename wins, and readers
  // find a whole file at any moment.
  const std::string part = name + "." + std::to_string(getpid()) + "-" +
                           std::to_string(files_begun.fetch_add(1, std::memory_order_relaxed)) + ".part";
  mkdir(folder.c_str(), 0700);
  unlink(part.c_str());  // of an earlier process with our number
  const Fd fd(open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));  // never through somebody's link
  if (!fd) {
    std::fprintf(stderr, "unisono: cannot write %s: %s\n", part.c_str(), std::strerror(errno));
    return;
  }
  size_t at = 0;
  while (at < text.size()) {
    const ssize_t put = write(fd.get(), text.data() + at, text.size() - at);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) break;
    at += static_cast<size_t>(put);
  }
  if (at < text.size() || std::rename(part.c_str(), name.c_str()) != 0) {
    std::fprintf(stderr, "unisono: cannot write %s: %s\n", name.c_str(), std::strerror(errno));
    std::remove(part.c_str());
  }
}

bool dump_on_signal(int number) {
  if (signal_pipe[0] < 0 && pipe2(signal_pipe, O_CLOEXEC) != 0) return false;
  signal_owner = getpid();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the program's threads
  bool started = true;
  try {
    std::thread(serve_signals).detach();
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  struct sigaction action{};
  action.sa_handler = handle_signal;
  action.sa_flags = SA_RESTART;
  return started && sigaction(number, &action, nullptr) == 0;
}

}  // namespace unisono

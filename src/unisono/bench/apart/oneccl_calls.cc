// oneCCL's calls behind a C interface, for oneccl_rank.py: Intel publishes no Python binding on PyPI.
//
// Compiled by `unisono bench --setup-peers` against the static library in the wheel oneccl-devel; the shared one
// crashes when it makes a communicator for host memory. The loop over calls is here, so that oneCCL is measured as its
// users meet it, from C++.
#include <chrono>
#include <cstring>
#include <memory>
#include <oneapi/ccl.hpp>
#include <string>
#include <vector>

// What the static library asks for and no wheel has: hooks for Intel's profiler. Null means that none is attached.
#define NO_PROFILER(name) extern "C" void* __itt_##name##_ptr__3_0 = nullptr
NO_PROFILER(domain_create);
NO_PROFILER(event_create);
NO_PROFILER(event_end);
NO_PROFILER(event_start);
NO_PROFILER(metadata_add);
NO_PROFILER(string_handle_create);
NO_PROFILER(task_begin);
NO_PROFILER(task_end);
NO_PROFILER(thread_set_name);
#undef NO_PROFILER

namespace {

std::shared_ptr<ccl::kvs> store;
std::unique_ptr<ccl::communicator> comm;
std::string error;

enum class Op : int { all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, barrier, ping, stream };

struct Case {
  Op op;
  char* in;
  char* out;
  const size_t* sent;      // elements per rank
  const size_t* received;  // elements per rank
  size_t ranks;
  size_t count;
  int even;
  int dtype;
  int redop;
  int rank;
};

constexpr int kWindow = 16;  // messages in flight in a stream, as WINDOW in cases.py

void ping(const Case& c) {
  const auto type = static_cast<ccl::datatype>(c.dtype);
  const int last = static_cast<int>(c.ranks) - 1;
  if (c.rank == 0) {
    ccl::send(c.in, c.count, type, last, *comm).wait();
    ccl::recv(c.out, c.count, type, last, *comm).wait();
  } else if (c.rank == last) {
    ccl::recv(c.out, c.count, type, 0, *comm).wait();
    ccl::send(c.in, c.count, type, 0, *comm).wait();
  }
}

void stream(const Case& c) {
  const auto type = static_cast<ccl::datatype>(c.dtype);
  const int last = static_cast<int>(c.ranks) - 1;
  std::vector<ccl::event> events;
  if (c.rank == 0) {
    for (int i = 0; i < kWindow; ++i) events.push_back(ccl::send(c.in, c.count, type, last, *comm));
    for (auto& event : events) event.wait();
    ccl::recv(c.out, 1, type, last, *comm).wait();
  } else if (c.rank == last) {
    for (int i = 0; i < kWindow; ++i) events.push_back(ccl::recv(c.out, c.count, type, 0, *comm));
    for (auto& event : events) event.wait();
    ccl::send(c.in, 1, type, 0, *comm).wait();
  }
}

void call(const Case& c, const std::vector<size_t>& sent, const std::vector<size_t>& received) {
  const auto type = static_cast<ccl::datatype>(c.dtype);
  const auto how = static_cast<ccl::reduction>(c.redop);
  switch (c.op) {
    case Op::all_reduce:
      ccl::allreduce(c.in, c.in, c.count, type, how, *comm).wait();
      break;
    case Op::all_gather:
      if (c.even)
        ccl::allgather(c.in, c.out, received[0], type, *comm).wait();
      else
        ccl::allgatherv(c.in, received[static_cast<size_t>(c.rank)], c.out, received, type, *comm).wait();
      break;
    case Op::reduce_scatter:
      ccl::reduce_scatter(c.in, c.out, received[0], type, how, *comm).wait();
      break;
    case Op::broadcast:
      ccl::broadcast(c.in, c.count, type, 0, *comm).wait();
      break;
    case Op::reduce:
      ccl::reduce(c.in, c.in, c.count, type, how, 0, *comm).wait();
      break;
    case Op::all_to_all:
      if (c.even)
        ccl::alltoall(c.in, c.out, received[0], type, *comm).wait();
      else
        ccl::alltoallv(c.in, sent, c.out, received, type, *comm).wait();
      break;
    case Op::barrier:
      ccl::barrier(*comm).wait();
      break;
    case Op::ping:
      ping(c);
      break;
    case Op::stream:
      stream(c);
      break;
  }
}

}  // namespace

extern "C" {

const char* unisono_ccl_error() { return error.c_str(); }

const char* unisono_ccl_version() {
  static std::string text;
  const ccl::library_version version = ccl::get_library_version();
  text = version.full;
  return text.c_str();
}

// Rank 0 fills `address` (ccl::kvs::address_max_size bytes, 256); the others are given it. 0 is success.
int unisono_ccl_open(int rank, int size, char* address, int has_address) {
  try {
    ccl::init();
    ccl::kvs::address_type place{};
    if (!has_address) {
      store = ccl::create_main_kvs();
      place = store->get_address();
      std::memcpy(address, place.data(), place.size());
      return 0;
    }
    if (!store) {
      std::memcpy(place.data(), address, place.size());
      store = ccl::create_kvs(place);
    }
    comm = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
    return 0;
  } catch (const std::exception& e) {
    error = e.what();
    return 1;
  }
}

// Seconds per call, or -1 with unisono_ccl_error().
double unisono_ccl_run(const Case* c, int calls) {
  try {
    const std::vector<size_t> sent(c->sent, c->sent + c->ranks), received(c->received, c->received + c->ranks);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call(*c, sent, received);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    return spent.count() / (calls > 0 ? calls : 1);
  } catch (const std::exception& e) {
    error = e.what();
    return -1;
  }
}

}  // extern "C"

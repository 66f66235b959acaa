// A peer that breaks every rule: it publishes descriptors, tables and messages and changes them while the other rank
// reads them. The sound rank may get any error or any values, but it must come back and touch only its own memory.
//
// One rank is real; the other, by the dice rank 0 or rank 1, is this file, which writes into its block by hand. Two
// threads: one publishes and flips, one makes the calls. Races are the point, so the thread sanitizer does not run
// this. UNISONO_FUZZ_SEED repeats a run, UNISONO_FUZZ_SECONDS makes it longer.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "engine/engine.h"

using namespace unisono;

// A message may say any size. The core asks for the memory without exceptions and takes no for an answer; so must the
// sanitizer's allocator, which would end the program instead.
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace {

struct World {
  std::shared_ptr<Heap> heaps[2];
  std::byte* blocks[2];
  int sound = 0, hostile = 1;

  void choose_hostile(std::mt19937_64& dice) {
    hostile = static_cast<int>(dice() % 2);
    sound = 1 - hostile;
  }
  void forget_hostile_block() { BlockRelease{heaps[hostile].get()}(blocks[hostile]); }
};

std::shared_ptr<Engine> join(World& world) {
  Failure failure;
  std::vector<Peer> peers;
  for (int r = 0; r < 2; r++) {
    world.blocks[r] = make_block(*world.heaps[r], 2, failure).release();
    if (!world.blocks[r]) std::printf("%s\n", failure.text.c_str()), std::exit(1);
    peers.push_back({world.heaps[r]->base(), world.heaps[r]->capacity(), world.heaps[r]->mapping(),
                     Block(world.blocks[r], 2), nullptr, 0});
  }
  GroupFacts facts{world.sound, 2, "hostile", 1, 50'000'000, true};
  return Engine::open(std::make_unique<Group>(facts, world.heaps[world.sound], std::move(peers)));
}

uint64_t any_number(std::mt19937_64& dice) {
  switch (dice() % 6) {
    case 0:
      return dice() % 100;
    case 1:
      return dice() % (1 << 20);
    case 2:
      return ~uint64_t{0} - dice() % 100;
    case 3:
      return uint64_t{1} << dice() % 64;
    case 4:
      return uint64_t{1} << 63 | (dice() % 3) << 48 | dice() % (size_t{64} << 20);  // a place
    default:
      return dice();
  }
}

// Publishes what a sound rank would, then changes one field after another until told to stop.
void attack(const Block& block, int rank, uint64_t seq, Verb verb, int root, size_t count, std::mt19937_64& dice,
            const std::atomic<bool>& stop) {
  Descriptor& d = block.descriptor(seq);
  TableEntry* table = block.table(seq);
  auto sound = [&] {
    d.said.verb = verb;
    d.said.dtype = DType::f32;
    d.said.op = verb == Verb::all_reduce || verb == Verb::reduce_scatter ? RedOp::sum : RedOp::none;
    d.said.root = static_cast<int16_t>(root);
    d.said.count = count;
    d.said.input = static_cast<Holder>(dice() % 5);
    d.said.has_table = 1;
    d.said.has_ring = 1;
    for (int r = 0; r < 2; r++) table[r] = {Place::at(rank, 4096), Place::at(rank, 8192), count, count};
  };
  sound();
  d.seq.store(seq, std::memory_order_release);
  for (int i = 1; i < static_cast<int>(Phase::count_); i++)
    block.flag(static_cast<Phase>(i)).store(seq, std::memory_order_release);
  while (!stop.load(std::memory_order_relaxed)) {
    volatile uint64_t* words[] = {&d.said.count,       &d.said.turn,       &d.said.in.word,     &d.said.out.word,
                                  &d.said.ring,        &table[0].in_count, &table[0].out_count, &table[1].in_count,
                                  &table[1].out_count, &table[0].in.word,  &table[0].out.word,  &table[1].in.word,
                                  &table[1].out.word};
    for (int i = 0; i < 50; i++) {
      *words[dice() % std::size(words)] = any_number(dice);
      if (dice() % 4 == 0) *const_cast<volatile Holder*>(&d.said.input) = static_cast<Holder>(dice() % 7);
    }
    sound();
  }
}

void test_collectives(uint64_t seed, int rounds) {
  World world;
  Failure failure;
  for (auto& heap : world.heaps) heap = Heap::create(failure);
  std::mt19937_64 dice(seed);
  int codes[static_cast<int>(Code::count_)] = {};
  for (int round = 0; round < rounds; round++) {
    world.choose_hostile(dice);
    auto engine = join(world);
    const Verb verbs[] = {Verb::gather,         Verb::scatter,    Verb::all_to_all, Verb::all_gather,
                          Verb::reduce_scatter, Verb::all_reduce, Verb::broadcast};
    const Verb verb = verbs[dice() % std::size(verbs)];
    const bool rooted = verb == Verb::gather || verb == Verb::scatter || verb == Verb::broadcast;
    const int root = rooted ? static_cast<int>(dice() % 2) : -1;
    const size_t count = dice() % 2 ? 10 : 5000;
    Heap& sound_heap = *world.heaps[world.sound];
    auto* in = static_cast<std::byte*>(sound_heap.allocate(2 * count * 4, failure));
    auto* out = static_cast<std::byte*>(sound_heap.allocate(2 * count * 4 + 64, failure));
    std::memset(static_cast<void*>(out), 7, 2 * count * 4 + 64);
    std::atomic<bool> stop{false};
    std::thread enemy([&, seed = dice()] {
      std::mt19937_64 own(seed);
      attack(Block(world.blocks[world.hostile], 2), world.hostile, 1, verb, root, count, own, stop);
    });
    const std::vector<Part> ins{{in, count}, {in + count * 4, count}}, outs{{out, count}, {out + count * 4, count}};
    Call call;
    call.verb = verb;
    call.dtype = DType::f32;
    call.op = verb == Verb::all_reduce || verb == Verb::reduce_scatter ? RedOp::sum : RedOp::none;
    call.root = root;
    call.count = count;
    call.in = verb == Verb::reduce_scatter || verb == Verb::scatter || verb == Verb::all_to_all ? nullptr : in;
    call.out = verb == Verb::all_gather || verb == Verb::gather || verb == Verb::all_to_all ? nullptr : out;
    if (verb == Verb::broadcast) call.in = call.out = out;
    if (verb == Verb::reduce_scatter || verb == Verb::all_to_all || (verb == Verb::scatter && root == world.sound))
      call.in_parts = ins.data();
    if (verb == Verb::all_gather || verb == Verb::all_to_all || (verb == Verb::gather && root == world.sound))
      call.out_parts = outs.data();
    codes[static_cast<int>(engine->run(call))]++;
    stop.store(true);
    enemy.join();
    for (size_t i = 0; i < 64; i++)
      if (out[2 * count * 4 + i] != std::byte{7}) std::printf("written past the end\n"), std::exit(1);
    world.forget_hostile_block();
    engine.reset();
    sound_heap.release(in);
    sound_heap.release(out);
  }
  std::printf("collectives: ok %d, mismatch %d, timeout %d, impossible %d\n", codes[static_cast<int>(Code::ok)],
              codes[static_cast<int>(Code::mismatch)], codes[static_cast<int>(Code::timeout)],
              codes[static_cast<int>(Code::system)]);
}

void test_messages(uint64_t seed, int rounds) {
  World world;
  Failure failure;
  for (auto& heap : world.heaps) heap = Heap::create(failure);
  std::mt19937_64 dice(seed);
  for (int round = 0; round < rounds; round++) {
    world.choose_hostile(dice);
    auto engine = join(world);
    const int sound = world.sound, hostile = world.hostile;
    Block block(world.blocks[hostile], 2);
    std::atomic<bool> stop{false};
    const size_t bytes = dice() % 2 ? 60 : 200'000;
    std::thread enemy([&, seed = dice()] {
      std::mt19937_64 own(seed);
      for (uint64_t i = 0; i < block.mailbox_depth(); i++) {
        MailboxEntry& entry = block.mailbox(sound, i);
        entry.envelope = {0, bytes, 1, Place::at(hostile, 4096), DType::f32, static_cast<Carrier>(own() % 3)};
        entry.filled.store(any_number(own), std::memory_order_relaxed);
        entry.posted.store(i + 1, std::memory_order_release);
      }
      while (!stop.load(std::memory_order_relaxed)) {
        Envelope& envelope = block.mailbox(sound, own() % block.mailbox_depth()).envelope;
        volatile uint64_t* words[] = {&envelope.bytes, &envelope.place.word, &envelope.seq};
        *words[own() % std::size(words)] = own() % 2 ? bytes : any_number(own);
        *const_cast<volatile Carrier*>(&envelope.carrier) = static_cast<Carrier>(own() % 4);
        if (own() % 8 == 0) *const_cast<volatile DType*>(&envelope.dtype) = static_cast<DType>(own() % 256);
        Reply& reply = block.reply(sound, own() % block.mailbox_depth());  // to what the sound rank sends
        volatile uint64_t* said[] = {&reply.error, &reply.wanted_bytes, &reply.wanted_dtype};
        *said[own() % std::size(said)] = any_number(own);
        reply.drained.store(own() % 2 ? own() % (2 * bytes) : any_number(own), std::memory_order_relaxed);
        if (own() % 32 == 0) reply.done.store(any_number(own), std::memory_order_relaxed);
        block.mailbox(sound, own() % block.mailbox_depth()).filled.store(any_number(own), std::memory_order_relaxed);
      }
    });
    std::vector<std::byte> data(bytes + 64, std::byte{7});
    for (int i = 0; i < 4; i++) {
      auto message = std::make_shared<Message>();
      message->sending = i == 3;
      message->peer = hostile;
      message->tag = i == 2 ? 5 : 0;  // the last one never comes: what fills the mailbox is taken aside
      message->data = data.data();
      message->bytes = bytes;
      message->dtype = DType::f32;
      Call call;
      call.verb = message->sending ? Verb::send : Verb::recv;
      if (engine->run(call, message) == Code::timeout) break;
    }
    stop.store(true);
    enemy.join();
    for (size_t i = bytes; i < data.size(); i++)
      if (data[i] != std::byte{7}) std::printf("written past the end\n"), std::exit(1);
    world.forget_hostile_block();
  }
}

}  // namespace

int main() {
  set_heap_capacity(size_t{64} << 20);
  const char* said = std::getenv("UNISONO_FUZZ_SEED");
  const char* seconds = std::getenv("UNISONO_FUZZ_SECONDS");
  uint64_t seed = said ? std::strtoull(said, nullptr, 10) : random_token().a % 1'000'000;
  const int64_t until = now_ns() + (seconds ? std::strtoll(seconds, nullptr, 10) : 0) * 1'000'000'000;
  do {
    std::printf("UNISONO_FUZZ_SEED=%lu\n", static_cast<unsigned long>(seed));
    std::fflush(stdout);
    test_collectives(seed, 400);
    test_messages(seed, 300);
    seed++;
  } while (now_ns() < until);
  return 0;
}

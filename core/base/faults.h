// Faults that tests inject at points of the code, and defences that they switch off to see that it is noticed.
//
// Compiled in only with UNISONO_FAULTS, which the product is built without: there every defence is up, and all of this
// is nothing.
#pragma once

#include <cstdint>
#include <string>

namespace unisono {

// What a test can switch off. In the order of `defence_names`.
enum class Defence : uint8_t {
  deaths,      // a peer whose connection has hung up is dead
  departures,  // a peer may say that it has left
  deadlines,   // a wait ends at its deadline, joining too
  agreement,   // what ranks ask for is compared
  endings,     // closing a group ends what is under way in it
  interrupts,  // a wait looks for Python's signals
  forks,       // a forked child does not use its parent's group
  strangers,   // whoever says something else than a hello at a rank's socket is sent away
  cycles,      // a cycle of waiting is looked for
  withdrawal,  // who failed keeps peers that may still write out of its tensors
  callbacks,   // closing leaves callbacks to other threads
  patience,    // a stopped peer is waited for: it may go on
  arguments,   // splits and tensors are checked before they are used
  order,       // one thread after the other runs its call in a group
  width,       // counts have more than 31 bits
  empties,     // a call without elements waits for all ranks like any other
  rest,        // who waits gives its processor away
  count_
};

#if defined(UNISONO_FAULTS)
// Does what a test asked for at this point, if it did: a phase's name, "joining", "message", "reading", "counting" or
// "deciding".
void reach(const char* point);
bool is_up(Defence defence);
// From now on in this process: at the `nth` time that `point` is reached (from 1; -n: from the nth on) it dies ("die"),
// stops
// ("stop") or sleeps for 0.3 s ("delay") or 0.8 s ("long delay").
void inject_fault(const std::string& point, const std::string& action, int nth);
bool switch_off(const std::string& defence);  // false: there is none of that name
#else
inline void reach(const char*) {}
constexpr bool is_up(Defence) {
  return true;
}
#endif

}  // namespace unisono

// What a forked child must not keep.
//
// A child (a data loader's worker) inherits every descriptor. The kernel tells the peers that a process is dead by closing
// its connections, and it does not while a child still has them: a killed parent would be found out by its silence only.
// So the child closes the sockets of the parent's rails before anything else runs in it. Nothing is sent by that, since
// the parent has them still. The handler uses no lock and no memory but a static map: another thread of the parent may
// have held any lock at the moment of the fork.
//
// The parent's threads are not in the child, so its objects cannot be used or taken apart there; they are left as they are.
#pragma once
#include <cstdint>
#include <thread>

namespace ftar {

void watch_forks();              // once, before the first of the following
void close_in_children(int fd);  // from now on
void keep_in_children(int fd);   // before it is closed here: its number may be another file's a moment later
uint32_t fork_generation();      // differs in a child from what it was in the parent
void abandon(std::thread& thread);  // in a child: a thread that exists in the parent only

}  // namespace ftar

// Which NICs are rails, who backs whom, and which rail of ours talks to which of theirs.
//
// With nothing configured every NIC that is up, has an address and is neither loopback nor the management NIC is a rail.
// The management NIC is the one with the default route of the lowest metric: a training job has no business there.
// Bridges and tunnels (docker0) are no NICs. FTAR_NET_RAILS names the rails instead, as FTAR_RAILS does:
//
//     rail0                      a device; its first IPv4 address, else its first global, else its link-local IPv6 one
//     rail0=10.1.0.3             this address, on whichever device has it
//     rail0=10.1.0.3@ens1f0      this address on this device
//
// The backup of a rail is the nearest other one: on the same NUMA node but another card, then the other port of the same
// card (it shares the card's fate), then any; among equals the next in order, so that not all NICs are backed by one.
// FTAR_NET_BACKUP=rail0=rail1,rail1=rail0 says otherwise, FTAR_NET_BACKUP=none leaves links with one rail.
#pragma once
#include <string>
#include <vector>

#include "../netio.h"
#include "../transport.h"

namespace ftar::nccl {

struct Nic {
  RailConfig config;
  Address address;
  int prefix_bits = 0;    // of the address's network
  std::string pci_path;   // sysfs; empty: no PCI device
  int numa_node = -1;     // -1: unknown
  int speed_mbit = 10000;  // what a NIC that does not say counts as
  bool speed_known = false;
};

// The rails of this machine; throws std::invalid_argument with the reason and the fix. `wanted` is FTAR_NET_RAILS.
std::vector<Nic> find_rails(const std::string& wanted);

// For each rail all rails in order of preference, itself first. `backups` is FTAR_NET_BACKUP. Throws
// std::invalid_argument.
std::vector<std::vector<int>> preference(const std::vector<Nic>& rails, const std::string& backups);

struct RailPair {
  int local;   // index of our rail
  int remote;  // position in the peer's list
};

// `order`: our rails by preference. Each rail of either side is used once. The peer's rail goes to our most preferred
// one that is left in the same network; if none of ours is in its network, a router has to know the way, and our most
// preferred one that is left takes it. So two NICs on separate switches find each other whatever devices NCCL names.
std::vector<RailPair> pair_rails(const std::vector<Nic>& ours, const std::vector<int>& order,
                                 const std::vector<Address>& theirs, size_t most);

}  // namespace ftar::nccl

// Sockets that belong to a rail, and what the kernel says about the rail's device.
//
// A socket of a rail is bound to the rail's device (SO_BINDTODEVICE), or the kernel would silently move an established
// flow to another NIC when a route vanishes and two "rails" would share one cable. The carrier is read by the ioctl
// ETHTOOL_GLINK: right 0.1 ms after the fact and 3 us long, where netlink's carrier events may be held back by the
// kernel for up to a second and get lost by a busy reader.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

namespace ftar {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  int port() const;
  void set_port(int port);
  std::string host() const;
  bool same_host(const Address& other) const;
};

// A numeric IPv4 or IPv6 address. `device` gives link-local addresses their scope. Throws std::invalid_argument.
Address parse_address(const std::string& host, int port, const std::string& device);

// What the device has now. Throws std::system_error.
std::vector<Address> addresses_of(const std::string& device, int family);

// Which of `present` to use: `wanted` if it is there, else the first of its kind (a link-local one is another kind); its
// port is that of `wanted`. nullopt: there is none.
std::optional<Address> choose_address(const Address& wanted, const std::vector<Address>& present);

// The address to use on the device now; throws std::runtime_error with the reason. Without a device: `wanted`.
Address current_address(const Address& wanted, const std::string& device);

// A listening TCP socket and a UDP socket on one port number: the address's, or any if that is 0 or taken. Throws std::invalid_argument (no such device or address)
// or std::system_error.
struct Sockets {
  int listener = -1;
  int udp = -1;
  int port = 0;
};
Sockets open_rail(const Address& address, const std::string& device, const std::string& rail);

// A TCP socket that is connecting. Throws std::system_error.
int dial(const Address& from, const Address& to, const std::string& device, const std::string& congestion);
void tune(int fd, const std::string& congestion);  // no delay, congestion control if the kernel has it

// Empty, or a sentence if this connection's packets are smaller than the device's MTU: the peer's is, or the path's.
std::string mtu_difference(int fd, const std::string& device, const Address& peer);

std::string socket_error(int error);  // "connection refused", ...

class CarrierReader {
 public:
  CarrierReader();
  ~CarrierReader();
  CarrierReader(const CarrierReader&) = delete;
  CarrierReader& operator=(const CarrierReader&) = delete;
  // True if the device has carrier, or has none to ask about; else false and why.
  bool carrier(const std::string& device, std::string* reason) const;

 private:
  int fd_;
};

}  // namespace ftar

// The kernel's news about devices and addresses (rtnetlink).
//
// News is a reason to look at once, never a fact: the kernel may hold carrier events back for up to a second, and a busy
// reader loses some (ENOBUFS), which is news too. What is true is read where it always is: carrier by ETHTOOL_GLINK,
// addresses by getifaddrs. Where there is no netlink, the poll of the carrier and a slow one of the addresses go on.
#pragma once

namespace ftar {

class RouteNews {
 public:
  RouteNews();
  ~RouteNews();
  RouteNews(const RouteNews&) = delete;
  RouteNews& operator=(const RouteNews&) = delete;

  int fd() const { return fd_; }  // -1: no netlink
  bool read();                    // true: a device or an address may have changed

 private:
  int fd_;
};

}  // namespace ftar

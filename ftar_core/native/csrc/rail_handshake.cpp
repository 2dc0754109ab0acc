// A connection's handshake, at both ends, up to its admission. See rail.h and frame.h.
#include <sys/socket.h>

#include "rail.h"
#include "transport.h"

namespace ftar {

namespace {
constexpr double kParkMs = 10000;
}  // namespace

bool Conn::consume_handshake() {
  const unsigned char* p = staging_ + begin_;
  const size_t have = end_ - begin_;
  const char* error = nullptr;
  if (stage_ == Stage::challenge) {
    if (have < Challenge::kSize) return false;
    if ((error = challenge_.parse(p)) != nullptr) return fail(error, ConnEnd::here), false;
    begin_ += Challenge::kSize;
    if (challenge_.version != kWireVersion) {
      // Tell the other side as well, which else sees nothing but an end.
      const std::string ours = Hello::version_only();
      [[maybe_unused]] const ssize_t n = ::send(fd_, ours.data(), ours.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      return fail(other_version(challenge_.version), ConnEnd::version), false;
    }
    if (hello_.epoch.empty()) return fail("answers", ConnEnd::answered), false;
    out_.append(hello_.write(key_, challenge_));
    stage_ = Stage::answer;
    flush();
    return true;
  }
  if (stage_ == Stage::hello) {
    if (have < Hello::kPrefix) return false;
    uint16_t version = 0;
    const size_t body = Hello::body_length(p, &version, &error);
    if (error != nullptr) return fail(error, ConnEnd::here), false;
    if (version != kWireVersion) {
      transport_.refused(*this, other_version(version));
      return fail(other_version(version), ConnEnd::here), false;
    }
    if (have < Hello::kPrefix + body) return false;
    const std::string_view text(reinterpret_cast<const char*>(p) + Hello::kPrefix, body);
    if ((error = hello_.parse(text, key_, challenge_)) != nullptr) return fail(error, ConnEnd::here), false;
    begin_ += Hello::kPrefix + body;
    stage_ = Stage::parked;
    later(kParkMs);
    transport_.proven(*this);
    return true;
  }
  if (stage_ == Stage::answer) {
    if (have < Answer::kPrefix) return false;
    const size_t reason = Answer::reason_length(p, &error);
    if (error != nullptr) return fail(error, ConnEnd::here), false;
    if (have < Answer::kPrefix + reason) return false;
    Answer answer;
    const std::string_view text(reinterpret_cast<const char*>(p), Answer::kPrefix + reason);
    if ((error = answer.parse(text, key_, challenge_, hello_)) != nullptr) return fail(error, ConnEnd::here), false;
    begin_ += text.size();
    if (answer.code == AnswerCode::refused) return fail("refused: " + answer.reason, ConnEnd::here), false;
    if (answer.code == AnswerCode::over) return fail("refused: " + answer.reason, ConnEnd::over), false;
    if (answer.code == AnswerCode::parked) {
      parked_by_peer_ = true;
      later(2 * kParkMs);
      user_->conn_parked(*this);
      return true;
    }
    parked_by_peer_ = false;
    stage_ = Stage::open;
    user_->conn_open(*this);
    return true;
  }
  if (have > 0) fail("bytes before admission", ConnEnd::here);  // parked: the dialler has to wait
  return false;
}

void Conn::admit(ConnUser* user, int slot) {
  user_ = user;
  slot_ = slot;
  stage_ = Stage::open;
  out_.append(Answer{AnswerCode::welcome, ""}.write(key_, challenge_, hello_));
  flush();
}

void Conn::tell_parked() {
  out_.append(Answer{AnswerCode::parked, ""}.write(key_, challenge_, hello_));
  flush();
}

void Conn::refuse(const std::string& reason, bool over) {
  out_.append(Answer{over ? AnswerCode::over : AnswerCode::refused, reason}.write(key_, challenge_, hello_));
  close(true);
}

}  // namespace ftar

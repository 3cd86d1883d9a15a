#include "ring/return_courier.h"

#include <algorithm>
#include <map>
#include <utility>

#include "annulus/events.h"
#include "ring/tags.h"

namespace annulus::ring {
namespace {

bool by_peer(const Hop& a, const Hop& b) {
  return a.peer != b.peer ? a.peer < b.peer : a.parcel < b.parcel;
}

}  // namespace

ReturnCourier::ReturnCourier(const Plan& plan, ParcelLayout layout, Link& link)
    : plan_(&plan),
      layout_(std::move(layout)),
      link_(&link),
      ring_(plan.options().schedule == Schedule::ring),
      together_(ring_ || link.in_order()),
      slots_(plan) {
  const std::size_t parcels = plan.parcels().size();
  std::vector<std::vector<Hop>> returning(static_cast<std::size_t>(plan.steps()));
  std::map<int, std::shared_ptr<const std::vector<CopyRun>>> runs;
  for (std::size_t i = 0; i < parcels; ++i) {
    const Parcel& parcel = plan.parcels()[i];
    if (parcel.owner != plan.rank()) continue;
    const int id = static_cast<int>(i);
    std::size_t step = 0;
    for (const int consumer : plan.itinerary(id)) {
      returning[step].push_back({id, consumer});
      if (ring_) ++step;
    }
    runs[id] = std::make_shared<const std::vector<CopyRun>>(
        copy_runs(plan.travelling_placement(), parcel));
  }
  std::int64_t largest_step_in = 0;
  std::int64_t largest_message = 0;
  for (int s = 1; s <= plan.steps(); ++s) {
    Step step;
    std::vector<Hop> out;
    for (const Hop& hop : plan.incoming(s)) {
      out.push_back({hop.parcel, plan.parcels()[static_cast<std::size_t>(hop.parcel)].owner});
    }
    std::sort(out.begin(), out.end(), by_peer);
    step.out = envelopes(out, layout_);
    step.slot_bytes = slots_.place(s, step.out, layout_);
    std::vector<Hop>& in = returning[static_cast<std::size_t>(s - 1)];
    std::sort(in.begin(), in.end(), by_peer);
    std::vector<Envelope> list = envelopes(in, layout_);
    largest_step_in = std::max(largest_step_in, lay_out(list));
    for (Envelope& envelope : list) {
      largest_message = std::max(largest_message, envelope.bytes);
      std::vector<ParcelCopy> copies;
      std::int64_t offset = 0;  // within the message
      for (const int id : envelope.parcels) {
        copies.push_back({id, offset, runs.at(id)});
        offset += layout_.bytes(id);
      }
      step.in.push_back({std::move(envelope), std::move(copies), nullptr, {}});
    }
    steps_.push_back(std::move(step));
  }
  inbox_bytes_ = together_ ? largest_step_in : 2 * largest_message;
  for (Step& step : steps_) {
    for (std::size_t i = 0; !together_ && i < step.in.size(); ++i)
      step.in[i].envelope.offset = i % 2 == 0 ? 0 : largest_message;
  }
}

std::int64_t ReturnCourier::buffer_bytes() const {
  return link_->mailbox_bytes(slots_.bytes() + inbox_bytes_);
}

void ReturnCourier::allocate() {
  slots_.allocate(*link_, "partial gradients");
  inbox_ = link_->make_mailbox(inbox_bytes_, "returning gradients");
  for (int s = 1; s <= plan_->steps(); ++s) {
    Step& step = steps_[static_cast<std::size_t>(s - 1)];
    step.batch.what = "gradients";
    step.batch.step = s;
    for (Incoming& incoming : step.in) {
      incoming.batch.what = step.batch.what;
      incoming.batch.step = s;
      incoming.add = link_->backend().compile(layout_, std::move(incoming.copies), link_->queue());
      Batch& batch = together_ ? step.batch : incoming.batch;
      batch.add(Way::receive, incoming.envelope.peer, kTagReturns, inbox_, incoming.envelope.offset,
                incoming.envelope.bytes);
    }
    for (const Envelope& envelope : step.out) {
      step.batch.add(Way::send, envelope.peer, kTagReturns, slots_.of_step(s), envelope.offset,
                     envelope.bytes);
    }
  }
}

void ReturnCourier::clear(int step) {
  const std::int64_t bytes = steps_[static_cast<std::size_t>(step - 1)].slot_bytes;
  link_->backend().clear(slots_.of_step(step).data(), bytes, link_->queue());
}

void ReturnCourier::post_receive(std::size_t index) {
  const Step& step = steps_[static_cast<std::size_t>(current_ - 1)];
  if (index < step.in.size())
    receives_[index % 2] = link_->post(step.in[index].batch, link_->queue().record());
}

void ReturnCourier::begin(int step) {
  current_ = step;
  if (!together_) {
    post_receive(0);
    post_receive(1);
  }
  posted_ = link_->post(steps_[static_cast<std::size_t>(step - 1)].batch, link_->queue().record());
}

void ReturnCourier::finish(std::span<const TensorRows> sections) {
  if (current_ == 0) return;
  const Step& step = steps_[static_cast<std::size_t>(current_ - 1)];
  if (together_) link_->wait(step.batch, posted_);
  for (std::size_t i = 0; i < step.in.size(); ++i) {
    const Incoming& incoming = step.in[i];
    if (!together_) link_->wait(incoming.batch, receives_[i % 2]);
    {
      const EventScope adding(EventKind::compute, "add", plan_->rank(), current_);
      link_->backend().add(*incoming.add, inbox_.data() + incoming.envelope.offset, sections,
                           link_->queue());
    }
    if (!together_) post_receive(i + 2);
  }
  if (!together_) link_->wait(step.batch, posted_);
  current_ = 0;
}

void ReturnCourier::cancel() {
  current_ = 0;
  posted_.reset();
  for (Posted& receive : receives_) receive.reset();
}

std::int64_t ReturnCourier::list_bytes() const {
  std::int64_t bytes = 0;
  for (const Step& step : steps_) {
    for (const Incoming& incoming : step.in) bytes += incoming.add->bytes();
  }
  return bytes;
}

std::int64_t ReturnCourier::bytes_sent() const {
  std::int64_t bytes = 0;
  for (const Step& step : steps_) {
    for (const Envelope& envelope : step.out) bytes += envelope.bytes;
  }
  return bytes;
}

}  // namespace annulus::ring

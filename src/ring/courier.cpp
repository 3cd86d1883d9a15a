#include "ring/courier.h"

#include <algorithm>
#include <utility>

#include "ring/tags.h"

namespace annulus::ring {

Courier::Courier(const Plan& plan, ParcelLayout layout, Link& link)
    : plan_(&plan), layout_(std::move(layout)), link_(&link), slots_(plan) {
  const std::size_t parcels = plan.parcels().size();
  outbox_offset_.assign(parcels, -1);
  for (std::size_t id = 0; id < parcels; ++id) {
    const Parcel& parcel = plan.parcels()[id];
    if (parcel.owner != plan.rank()) continue;
    own_.push_back({static_cast<int>(id), outbox_bytes_,
                    std::make_shared<const std::vector<CopyRun>>(
                        copy_runs(plan.travelling_placement(), parcel))});
    outbox_offset_[id] = outbox_bytes_;
    outbox_bytes_ += layout_.bytes(static_cast<int>(id));
  }
  for (int s = 1; s <= plan.steps(); ++s) {
    Step step;
    step.in = envelopes(plan.incoming(s), layout_);
    step.out = envelopes(plan.outgoing(s), layout_);
    slots_.place(s, step.in, layout_);
    // A message whose parcels are adjacent is sent in place. Others are gathered in the staging
    // area.
    std::int64_t staged = 0;
    const std::vector<std::int64_t>& source = s == 1 ? outbox_offset_ : slots_.offsets();
    for (Envelope& envelope : step.out) {
      std::int64_t expected = source[static_cast<std::size_t>(envelope.parcels.front())];
      envelope.offset = expected;
      bool direct = true;
      for (int id : envelope.parcels) {
        direct = direct && source[static_cast<std::size_t>(id)] == expected;
        expected += layout_.bytes(id);
      }
      step.staged.push_back(!direct);
      if (direct) continue;
      envelope.offset = staged;
      for (int id : envelope.parcels) {
        step.copies.push_back({s == 1 ? &outbox_ : &slots_.of_step(s - 1),
                               source[static_cast<std::size_t>(id)], staged, layout_.bytes(id)});
        staged += layout_.bytes(id);
      }
    }
    staging_bytes_ = std::max(staging_bytes_, staged);
    steps_.push_back(std::move(step));
  }
}

std::int64_t Courier::buffer_bytes() const {
  return link_->mailbox_bytes(outbox_bytes_ + slots_.bytes() + staging_bytes_);
}

void Courier::allocate() {
  packing_ = link_->backend().compile(layout_, std::move(own_), link_->queue());
  outbox_ = link_->make_mailbox(outbox_bytes_, "outgoing rows");
  slots_.allocate(*link_, "incoming rows");
  staging_ = link_->make_mailbox(staging_bytes_, "forwarded rows");
  for (int s = 1; s <= plan_->steps(); ++s) {
    Step& step = steps_[static_cast<std::size_t>(s - 1)];
    step.batch.what = "rows";
    step.batch.step = s;
    for (const Envelope& envelope : step.in) {
      step.batch.add(Way::receive, envelope.peer, kTagParcels, slots_.of_step(s), envelope.offset,
                     envelope.bytes);
    }
    const Mailbox& source = s == 1 ? outbox_ : slots_.of_step(s - 1);
    for (std::size_t i = 0; i < step.out.size(); ++i) {
      step.batch.add(Way::send, step.out[i].peer, kTagParcels, step.staged[i] ? staging_ : source,
                     step.out[i].offset, step.out[i].bytes);
    }
  }
}

void Courier::pack(std::span<const TensorRows> sections) {
  link_->backend().pack(*packing_, sections, outbox_.data(), link_->queue());
}

void Courier::prepare(int step) {
  const Step& plan = steps_[static_cast<std::size_t>(step - 1)];
  for (const Staged& copy : plan.copies) {
    link_->queue().copy(staging_.data() + copy.target, copy.from->data() + copy.source, copy.bytes);
  }
  current_ = step;
  ready_ = link_->queue().record();
}

void Courier::post() {
  posted_ = link_->post(steps_[static_cast<std::size_t>(current_ - 1)].batch, ready_);
}

void Courier::finish() {
  if (current_ == 0) return;
  link_->wait(steps_[static_cast<std::size_t>(current_ - 1)].batch, posted_);
  current_ = 0;
}

void Courier::cancel() {
  posted_.reset();
  current_ = 0;
}

std::int64_t Courier::bytes_sent() const {
  std::int64_t bytes = 0;
  for (const Step& step : steps_) {
    for (const Envelope& envelope : step.out) bytes += envelope.bytes;
  }
  return bytes;
}

}  // namespace annulus::ring

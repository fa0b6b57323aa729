//! A separate frontend, scheduler and backend: their state machines, with each frame between them
//! encoded and decoded. Requests carry the tensor of `mlp`.

use std::collections::VecDeque;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use anyhow::{Result, bail, ensure};
use downbeat_cluster::{Outbox, ReadBudget, Tensors, read_frame};
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, Order};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_host::request::batch_codec::OutputPart;
use downbeat_roles::*;

use super::server::{INPUTS, input_values};
use crate::gate::part::Plan;

const FRONTEND: NodeId = NodeId(1);
const SCHEDULER: NodeId = NodeId(2);
const BACKEND: NodeId = NodeId(3);
const NODES: [NodeId; 3] = [FRONTEND, SCHEDULER, BACKEND];
const HEARTBEAT: Duration = Duration::from_millis(10);
const LOST_AFTER: Duration = Duration::from_millis(1_000);
/// Requests that come together, and the time between two such: 100 000 requests a second.
const AT_ONCE: u64 = 8;
const EVERY: Duration = Duration::from_micros(80);
const SLO: Duration = Duration::from_millis(50);
const SLOTS: u32 = 32;
const MAX_BATCH: u32 = 8;
/// Most bytes of a frame's tensors.
const LARGEST: u64 = 1 << 20;

/// Counts requests that go from the frontend by way of the scheduler to the backend, and back.
pub fn run(plan: &Plan) -> Result<()> {
    let mut world = World::new()?;
    plan.run(|requests| {
        for _ in 0..requests / AT_ONCE {
            world.round()?;
        }
        let World { asked, answered, .. } = world;
        ensure!(answered > 0 && answered + 10_000 > asked, "{answered} of {asked} requests were answered");
        Ok(())
    })
}

struct World {
    time: Time,
    frontend: FrontendNode<Tensors>,
    scheduler: Box<SchedulerNode<Tensors>>,
    backend: BackendNode<Tensors>,
    /// Frames under way, each with its receiver.
    frames: VecDeque<(NodeId, Frame<Tensors>)>,
    outbox: Outbox,
    bytes: Vec<u8>,
    scratch: Vec<u8>,
    budget: ReadBudget,
    input: Tensors,
    output: Tensors,
    /// The batches on the device: the end of each, and its members.
    running: VecDeque<(Time, BatchKey, Vec<RequestKey>)>,
    asked: u64,
    answered: u64,
}

impl World {
    fn new() -> Result<World> {
        let time = Time::ZERO;
        let options = SchedulerOptions {
            rank: 0,
            schedulers: 1,
            heartbeat: HEARTBEAT,
            takeover_after: HEARTBEAT,
            peer_heartbeat: HEARTBEAT,
            lost_after: LOST_AFTER,
            wake_margin: Duration::ZERO,
            order: Order::default(),
            is_rehearsed: false,
            epochs_are_allotted: false,
            sub_clusters: None,
        };
        let frontend_options = FrontendOptions { heartbeat: HEARTBEAT, lost_after: LOST_AFTER, tries: 2 };
        let fetch_within = Duration::from_millis(5);
        let backend_options = BackendOptions { heartbeat: HEARTBEAT, lost_after: LOST_AFTER, fetch_within };
        let mut backend = BackendNode::new(BACKEND, backend_options, time);
        backend.handle_offer(time, offer()?);
        let input: Vec<u8> = input_values().flat_map(f32::to_le_bytes).collect();
        let tensors = |columns: usize, data: Vec<u8>| {
            let shape = vec![1, columns as i64];
            std::iter::once(OutputPart { shape, data: data.into() }).collect::<Tensors>()
        };
        let mut world = World {
            time,
            frontend: FrontendNode::new(FRONTEND, frontend_options, time),
            scheduler: Box::new(SchedulerNode::new(SCHEDULER, options, time)),
            backend,
            frames: VecDeque::new(),
            outbox: Outbox::default(),
            bytes: Vec::new(),
            scratch: Vec::new(),
            budget: ReadBudget::new(LARGEST),
            input: tensors(INPUTS, input),
            output: tensors(10, vec![0; 40]),
            running: VecDeque::new(),
            asked: 0,
            answered: 0,
        };
        for (me, peer) in NODES.into_iter().flat_map(|me| NODES.map(|peer| (me, peer))).filter(|(me, peer)| me != peer)
        {
            match me {
                FRONTEND => world.frontend.handle_connected(time, &hello(peer)),
                SCHEDULER => world.scheduler.handle_connected(time, &hello(peer)),
                _ => world.backend.handle_connected(time, &hello(peer)),
            }
        }
        // The scheduler must lead, and all nodes must have heard of it.
        for _ in 0..10 {
            world.time += HEARTBEAT;
            world.exchange()?;
        }
        ensure!(world.frontend.leader() == Some(SCHEDULER), "the scheduler leads");
        Ok(world)
    }

    fn round(&mut self) -> Result<()> {
        self.time += EVERY;
        for _ in 0..AT_ONCE {
            let request = NewRequest {
                queue: queue(),
                payload: self.input.clone(),
                deadline: self.time + SLO,
                queue_expiry: Time::MAX,
                level: 0,
                size: 1,
            };
            self.frontend.handle_request(self.time, request);
        }
        self.asked += AT_ONCE;
        while self.running.front().is_some_and(|(end, ..)| *end <= self.time) {
            let Some((_, batch, members)) = self.running.pop_front() else { break };
            let ran = Some((members.len() as u32, profile()?.latency(members.len() as u32)));
            let outcome = |member| (member, Outcome::Outputs(self.output.clone()));
            let run = ran.map(|(items, took)| BatchRun {
                device: 0,
                items,
                compute_input: Duration::from_micros(10),
                compute_infer: took,
                compute_output: Duration::from_micros(10),
                ended_ago: Duration::from_micros(10),
                counts: true,
            });
            self.backend.handle_ran(self.time, batch, ran, run, members.into_iter().map(outcome).collect());
        }
        self.exchange()
    }

    /// Lets the nodes work until none has a message to send.
    fn exchange(&mut self) -> Result<()> {
        self.frontend.handle_timeout(self.time);
        self.scheduler.handle_timeout(self.time);
        self.backend.handle_timeout(self.time);
        loop {
            self.poll_frontend();
            self.poll_scheduler();
            self.poll_backend()?;
            if self.frames.is_empty() {
                return Ok(());
            }
            while let Some((to, frame)) = self.frames.pop_front() {
                let frame = self.carry(&frame)?;
                match to {
                    FRONTEND => self.frontend.handle_frame(self.time, frame),
                    SCHEDULER => self.scheduler.handle_frame(self.time, frame),
                    _ => self.backend.handle_frame(self.time, frame),
                }
            }
        }
    }

    fn poll_frontend(&mut self) {
        while let Some(output) = self.frontend.poll_output(self.time) {
            match output {
                FrontendOutput::Send(to, frame) => self.frames.push_back((to, frame)),
                FrontendOutput::End { .. } => self.answered += 1,
                _ => {}
            }
        }
    }

    fn poll_scheduler(&mut self) {
        while let Some(output) = self.scheduler.poll_output(self.time) {
            if let SchedulerOutput::Send(to, frame) = output {
                self.frames.push_back((to, frame));
            }
        }
    }

    fn poll_backend(&mut self) -> Result<()> {
        while let Some(output) = self.backend.poll_output(self.time) {
            match output {
                BackendOutput::Send(to, frame) => self.frames.push_back((to, frame)),
                BackendOutput::Run { batch, members, .. } => {
                    let end = self.time + Duration::from_millis(1);
                    let members = members.into_iter().map(|member| member.request).collect();
                    self.running.push_back((end, batch, members));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Encodes a frame as bytes, and decodes it again.
    fn carry(&mut self, frame: &Frame<Tensors>) -> Result<Frame<Tensors>> {
        self.outbox.put_frame(frame, None)?;
        self.bytes.clear();
        let bytes = &mut self.bytes;
        self.outbox.write(|pieces| {
            pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
            Ok(pieces.iter().map(|piece| piece.len()).sum())
        })?;
        let mut reader = &self.bytes[..];
        let read = pin!(read_frame(&mut reader, &mut self.scratch, &self.budget, None));
        match read.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(Some(frame))) => Ok(frame),
            Poll::Ready(Ok(None)) | Poll::Pending => bail!("a frame is whole"),
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }
}

fn hello(node: NodeId) -> Hello {
    let role = match node {
        FRONTEND => Role::Frontend,
        SCHEDULER => Role::Scheduler { rank: 0 },
        _ => Role::Backend,
    };
    Hello { protocol: PROTOCOL, node, role, name: String::new(), address: "f:1".to_owned() }
}

fn queue() -> QueueKey {
    QueueKey { model: "mlp".to_owned(), version: 1, shape: Vec::new() }
}

fn profile() -> Result<LatencyProfile> {
    Ok(LatencyProfile::linear(Duration::from_micros(50), Duration::from_micros(600), MAX_BATCH)?)
}

/// 32 slots, more than are needed.
fn offer() -> Result<Offer> {
    let profile = profile()?;
    let model = OfferedModel {
        model: queue().model,
        version: 1,
        fingerprint: String::new(),
        definition: Vec::new(),
        max_batch: MAX_BATCH,
        drop: DropPolicy::Adaptive,
        dispatch: DispatchPolicy::Adaptive { consolidate: false },
        max_wait: Duration::MAX,
        levels: Vec::new(),
        at_once: SLOTS,
        item_bytes: 0,
        may_repeat: true,
        shape: Vec::new(),
        profiles: (0..SLOTS).map(|slot| (slot, profile.clone())).collect(),
    };
    Ok(Offer {
        slots: (0..SLOTS).map(|_| Slot { hardware: "cpu".to_owned(), device: 0, is_seat: false }).collect(),
        models: vec![model],
        ..Offer::default()
    })
}

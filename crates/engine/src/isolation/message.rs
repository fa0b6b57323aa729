//! The messages between the server and an executor process. They are JSON behind a length, over
//! Unix sockets; files go beside them. Tensors are in shared memory, and a message has their
//! places.

use std::io::{self, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use downbeat_core::LatencyProfile;
use downbeat_core::tensor::{DataType, TensorSpec};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cut::activations::Activations;
use crate::cut::operator_profile::OperatorProfile;
use crate::cut::{Cut, SegmentInfo};
use crate::memory::region::Region;
use crate::tensor::{ALIGNMENT, Tensor};

/// Longest message, bytes.
const LONGEST: usize = 64 << 20;
/// Most files that come with a message.
const MOST_FILES: usize = 3;

/// A call to an executor process over its control socket.
#[derive(Serialize, Deserialize)]
pub(super) enum Call {
    /// Loads the model; the first call, made once.
    Load(Box<LoadCall>),
    /// Opens a lane. The lane's socket and the regions of its inputs and outputs come with the
    /// message.
    Lane(LaneCall),
    /// Ends a run of a lane as soon as the engine can, unless the run is over; not answered.
    Stop { lane: u64, run: u64 },
}

/// The model to load and the options of the load: see [`crate::LoadOptions`].
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct LoadCall {
    /// Name of the engine.
    pub engine: String,
    /// The engine's library, if it has one.
    pub library: Option<PathBuf>,
    /// Threads of the pool that runs share.
    pub pool: usize,
    pub path: PathBuf,
    pub threads: usize,
    /// The cores that the process is bound to.
    pub cores: Option<String>,
    #[serde(with = "CutForm")]
    pub cut: Cut,
    pub cache: Option<PathBuf>,
    pub operators: Option<OperatorProfile>,
    /// The limits of a process that only tries the file.
    pub limits: Option<TrialLimits>,
    /// The settings of a worker that is no executor of this program.
    #[serde(default)]
    pub settings: serde_json::Value,
}

/// The limits of a trial process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialLimits {
    /// The longest time from the process's start to its end.
    pub time: std::time::Duration,
    /// The most memory that the process writes to, bytes; `None`: no limit.
    pub memory: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Cut")]
enum CutForm {
    Whole,
    Stages(usize),
    UpTo(usize),
    At(Vec<String>),
}

/// A lane of the model.
#[derive(Serialize, Deserialize)]
pub(super) struct LaneCall {
    /// The server's number of the lane.
    pub lane: u64,
    /// The cores that the lane is bound to.
    pub cores: Option<String>,
    /// The runs of the lane before it serves.
    pub warm_up: Vec<WarmRun>,
}

/// A run that warms a lane, with a batch that the process makes itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct WarmRun {
    pub first: usize,
    pub end: usize,
    pub shapes: Vec<Vec<usize>>,
}

/// The answer of an executor process.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    Loaded(Box<Loaded>),
    /// The lane is open.
    Lane,
    Failed {
        /// Whether the file could not be read, rather than run.
        of_file: bool,
        reason: String,
    },
}

/// The description of a loaded model: see [`crate::Model`].
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Loaded {
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    pub segments: Vec<SegmentInfo>,
    pub activations: Option<Activations>,
    pub operators: Option<OperatorProfile>,
    pub profile: Option<LatencyProfile>,
    pub rewritten: Option<String>,
    /// The configuration as the model completes it.
    #[serde(default)]
    pub configuration: Option<String>,
    /// See [`Metering`].
    #[serde(default)]
    pub metering: Metering,
    /// Whether the code has a check of its own readiness.
    #[serde(default)]
    pub checks_ready: bool,
}

/// Changes of the metrics that a model's code keeps, as JSON: one value for each changed metric.
pub(super) type Metering = Vec<serde_json::Value>;

/// A message to a lane: run segments on a batch.
#[derive(Serialize, Deserialize)]
pub(super) struct RunCall {
    /// The server's number of the run.
    pub run: u64,
    pub first: usize,
    pub end: usize,
    pub batch: Batch,
    /// The requests of a batch whose tensors are not joined.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub asked: Vec<Asked>,
}

/// A request of a batch whose tensors are not joined.
#[derive(Serialize, Deserialize)]
pub(super) struct Asked {
    pub rows: u32,
    /// The places of its inputs among the tensors of the batch; `None`: left out.
    pub inputs: Vec<Option<usize>>,
    pub id: String,
    /// The parameters, as JSON.
    pub parameters: String,
    /// The names of the wanted outputs; empty: all.
    pub outputs: Vec<String>,
    /// The time until its deadline.
    pub budget_us: Option<u64>,
    /// The place of the byte in the region that is not 0 once the client has left.
    pub left: usize,
    /// The number of the request's place in the [`AnswerTable`](super::AnswerTable), if the model
    /// may give any number of answers.
    pub answers: Option<u64>,
    /// Whether the server made up the request.
    pub is_made_up: bool,
}

/// The answer of a lane.
#[derive(Serialize, Deserialize)]
pub(super) enum RunAnswer {
    Ran(Batch),
    Failed(String),
    /// An answer for each request, with the outputs of all requests in one batch.
    Answered {
        batch: Batch,
        requests: Vec<Reply>,
        /// Whether the process still uses the inputs, so that no other run may overwrite them.
        #[serde(default)]
        keeps_inputs: bool,
        #[serde(default)]
        metering: Metering,
    },
    /// The model's code failed, for all requests.
    Raised {
        reason: String,
        #[serde(default)]
        keeps_inputs: bool,
        #[serde(default)]
        metering: Metering,
    },
}

/// The answer to a request.
#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    Outputs {
        /// The places of the outputs among the tensors of the batch; `None`: there is no such output.
        places: Vec<Option<usize>>,
        /// The parameters of the answer, as a JSON object.
        #[serde(default)]
        parameters: Option<String>,
    },
    /// The model's code refused the request, with Triton's number of the kind of error.
    Error { reason: String, code: Option<u32> },
}

/// Tensors in a region.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Batch {
    /// The region's length, bytes.
    region: usize,
    tensors: Vec<Placed>,
}

#[derive(Serialize, Deserialize)]
struct Placed {
    datatype: DataType,
    shape: Vec<usize>,
    begin: usize,
    len: usize,
}

impl Batch {
    /// Writes tensors into a region.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn write(tensors: &[Tensor], region: &mut Region) -> io::Result<Batch> {
        Batch::write_behind(0, tensors.iter(), region)
    }

    /// Writes tensors into a region, behind its first `head` bytes.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn write_behind<'a>(
        head: usize,
        tensors: impl ExactSizeIterator<Item = &'a Tensor> + Clone,
        region: &mut Region,
    ) -> io::Result<Batch> {
        let mut end = head;
        let mut placed = Vec::with_capacity(tensors.len());
        for Tensor { datatype, shape, data } in tensors.clone() {
            let (begin, len) = (end.next_multiple_of(ALIGNMENT), data.len());
            end = begin.checked_add(len).ok_or(io::ErrorKind::OutOfMemory)?;
            placed.push(Placed { datatype: *datatype, shape: shape.clone(), begin, len });
        }
        region.grow_to(end)?;
        for (tensor, placed) in tensors.zip(&placed) {
            region.write(placed.begin, tensor.data.as_slice());
        }
        Ok(Batch { region: region.len(), tensors: placed })
    }

    /// The tensors, in place in the region.
    ///
    /// # Errors
    /// If they are not within the region.
    pub fn read(self, region: &mut Region) -> io::Result<Vec<Tensor>> {
        region.follow(self.region)?;
        let tensors = self.tensors.into_iter().map(|Placed { datatype, shape, begin, len }| {
            let data = region.part(begin, len).ok_or(io::ErrorKind::InvalidData)?;
            Ok(Tensor { datatype, shape, data: data.into() })
        });
        tensors.collect()
    }
}

/// One end of a socket, with a buffer for its messages.
pub(super) struct Wire {
    reader: BufReader<UnixStream>,
    bytes: Vec<u8>,
}

impl Wire {
    pub fn new(stream: UnixStream) -> Wire {
        Wire { reader: BufReader::new(stream), bytes: Vec::new() }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the other process is gone.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.send_with(message, &[])
    }

    /// Sends a message with files.
    ///
    /// # Errors
    /// As [`Wire::send`].
    pub fn send_with(&mut self, message: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(self.reader.get_ref(), &mut self.bytes, message, files)
    }

    /// The next message.
    ///
    /// # Errors
    /// If the other process is gone, or the message is invalid.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut head = [0; 4];
        self.reader.read_exact(&mut head)?;
        body(&mut self.reader, head, &mut self.bytes)
    }
}

/// Reads arbitrary bytes as messages of the other process, with tensors in a region of `region`
/// bytes. The first byte chooses the kind of message. Returns the number of messages that could be
/// read. For fuzz tests.
///
/// # Errors
/// If the operating system has no socket or memory left.
pub fn read_as_process(bytes: &[u8], region: usize) -> io::Result<usize> {
    let Some((kind, bytes)) = bytes.split_first() else { return Ok(0) };
    let (mut other, own) = UnixStream::pair()?;
    other.set_nonblocking(true)?;
    // Bytes that do not fit into the socket are lost, as at the end of a process.
    let _ = other.write_all(bytes);
    drop(other);
    let mut own_region = Region::create()?;
    own_region.grow_to(region)?;
    let mut wire = Wire::new(own);
    let mut messages = 0;
    loop {
        let read = match kind % 4 {
            0 => wire.receive::<Call>().map(drop),
            1 => wire.receive::<Answer>().map(drop),
            2 => wire.receive::<RunCall>().map(|call| drop(call.batch.read(&mut own_region))),
            _ => wire.receive::<RunAnswer>().map(|answer| {
                if let RunAnswer::Ran(batch) | RunAnswer::Answered { batch, .. } = answer {
                    drop(batch.read(&mut own_region));
                }
            }),
        };
        if read.is_err() {
            return Ok(messages);
        }
        messages += 1;
    }
}

/// Sends a message with files. `bytes` is its buffer.
///
/// # Errors
/// If the other process is gone.
pub(super) fn send(
    mut stream: &UnixStream,
    bytes: &mut Vec<u8>,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    bytes.clear();
    bytes.extend([0; 4]);
    serde_json::to_writer(&mut *bytes, message)?;
    let len = bytes.len() - 4;
    let head = u32::try_from(len).ok().filter(|_| len <= LONGEST).ok_or(io::ErrorKind::InvalidInput)?;
    bytes[..4].copy_from_slice(&head.to_le_bytes());
    if files.is_empty() {
        return stream.write_all(bytes);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(files)), "a message has at most {MOST_FILES} files");
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL)?;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

/// Receives the next message with its files.
///
/// # Errors
/// As [`Wire::receive`].
pub(super) fn receive_with<T: DeserializeOwned>(mut stream: &UnixStream) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut head = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let slice = &mut [IoSliceMut::new(&mut head)];
    let got = rustix::net::recvmsg(stream, slice, &mut beside, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut files = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(head.get_mut(got..).unwrap_or_default())?;
    Ok((body(&mut stream, head, &mut Vec::new())?, files))
}

fn body<T: DeserializeOwned>(stream: &mut impl Read, head: [u8; 4], bytes: &mut Vec<u8>) -> io::Result<T> {
    let len = u32::from_le_bytes(head) as usize;
    if len > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.clear();
    bytes.resize(len, 0);
    stream.read_exact(bytes)?;
    Ok(serde_json::from_slice(bytes)?)
}

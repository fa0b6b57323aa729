//! A simulated process of a cluster: a connection to a real one, with its link. Frames are those of
//! `crates/server/src/roles/wire.rs`.

use std::io;

use anyhow::{Result, bail, ensure};
use downbeat_core::Duration;
use downbeat_core::Time;
use downbeat_roles::{Frame, Hello, LinkEvent, LinkTiming, Links, Message, NodeId, PROTOCOL};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timing of the links: as with the default `lost_after`.
const TIMING: LinkTiming =
    LinkTiming { heartbeat: Duration::from_millis(100), lost_after: Duration::from_millis(10_000) };
/// Bytes that are read at once.
const READ_BYTES: usize = 256 << 10;

/// One end of a connection.
pub struct Peer {
    /// The peer's introduction.
    pub other: Hello,
    links: Links<()>,
    stream: TcpStream,
    come: Vec<u8>,
    to_write: Vec<u8>,
    read_into: Vec<u8>,
}

impl Peer {
    /// Introduces this node, and waits for the peer's introduction.
    pub async fn greet(mut stream: TcpStream, me: &Hello, now: Time) -> Result<Peer> {
        stream.set_nodelay(true)?;
        let other = downbeat_cluster::greet_listener(&mut stream, me).await?;
        // Neither process reads memory of the other.
        stream.write_all(&[0]).await?;
        stream.read_u8().await?;
        let mut links = Links::new(me.node);
        links.handle_connected(now, &other, TIMING);
        Ok(Peer { other, links, stream, come: Vec::new(), to_write: Vec::new(), read_into: vec![0; READ_BYTES] })
    }

    /// Waits until bytes have come.
    pub async fn readable(&self) -> io::Result<()> {
        self.stream.readable().await
    }

    /// Queues a message, which [`Peer::write`] writes.
    pub fn say(&mut self, now: Time, message: Message<()>) {
        self.links.say(now, self.other.node, message);
    }

    /// Reads the bytes that have come, and returns their messages. `None` in a message's place: the
    /// link has come up.
    pub fn read(&mut self, now: Time) -> Result<Vec<Option<Message<()>>>> {
        loop {
            match self.stream.try_read(&mut self.read_into) {
                Ok(0) => bail!("{} has closed its connection", self.other.name),
                Ok(count) => self.come.extend_from_slice(&self.read_into[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        let mut done = 0;
        while let Some(([l0, l1, l2, l3, checksum @ ..], rest)) = self.come[done..].split_first_chunk::<8>() {
            let Some(body) = rest.get(..u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize) else { break };
            ensure!(crc32fast::hash(body).to_le_bytes() == *checksum, "a frame is damaged");
            let frame: Frame<()> = postcard::from_bytes(body)?;
            self.links.handle_frame(now, frame);
            done += 8 + body.len();
        }
        self.come.drain(..done);
        self.links.handle_timeout(now);
        let mut said = Vec::new();
        while let Some(event) = self.links.poll_event() {
            match event {
                LinkEvent::Up(_) => said.push(None),
                LinkEvent::Message(_, message) => said.push(Some(message)),
                LinkEvent::Lost { .. } => bail!("the link to {} is lost", self.other.name),
            }
        }
        Ok(said)
    }

    /// Writes queued messages. Returns how many bytes are still unwritten.
    pub fn write(&mut self, now: Time) -> Result<usize> {
        while let Some((_, frame)) = self.links.poll_frame(now) {
            let begin = self.to_write.len();
            self.to_write.extend_from_slice(&[0; 8]);
            self.to_write = postcard::to_extend(&frame, std::mem::take(&mut self.to_write))?;
            let length = u32::try_from(self.to_write.len() - begin - 8)?;
            let checksum = crc32fast::hash(&self.to_write[begin + 8..]);
            self.to_write[begin..begin + 4].copy_from_slice(&length.to_le_bytes());
            self.to_write[begin + 4..begin + 8].copy_from_slice(&checksum.to_le_bytes());
        }
        if !self.to_write.is_empty() {
            match self.stream.try_write(&self.to_write) {
                Ok(written) => drop(self.to_write.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.to_write.len())
    }
}

/// A simulated node: `number` tells it from others.
pub fn hello(number: u64, role: downbeat_roles::Role, name: &str, address: &str) -> Hello {
    let node = NodeId((u64::from(std::process::id()) << 32) + number);
    Hello { protocol: PROTOCOL, node, role, name: name.to_owned(), address: address.to_owned() }
}

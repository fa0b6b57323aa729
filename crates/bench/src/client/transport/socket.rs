//! A socket of a load thread, with TLS or without. No call blocks.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::ClientConnection;

use crate::client::tls::Tls;
use crate::results::outcome::{Failed, Failure};

/// A socket, and what TLS knows of its connection.
pub(super) struct Socket {
    fd: OwnedFd,
    tls: Option<Box<ClientConnection>>,
}

/// The bytes of the socket itself.
struct Raw<'a>(&'a OwnedFd);

impl Read for Raw<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(self.0, &mut *buffer))?)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL))?)
    }

    /// All records of a large request in one call, where single writes would wake the server for each.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let send = || rustix::net::sendmsg(self.0, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        Ok(retry_on_intr(send)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    /// A socket that has begun to connect.
    ///
    /// # Errors
    /// If TLS cannot begin.
    pub fn new(fd: OwnedFd, tls: Option<&Tls>) -> Result<Socket, Failed> {
        let session = tls.map(Tls::session).transpose();
        let mut session = session.map_err(|error| Failed::new(Failure::Connect, error.to_string()))?;
        if let Some(session) = &mut session {
            // A request waits here for the end of the handshake: no event would ask for its rest.
            session.set_buffer_limit(None);
        }
        Ok(Socket { fd, tls: session.map(Box::new) })
    }

    /// The socket itself.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Sends as many bytes as can be taken now.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room; the errors of the connection.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Socket { fd, tls } = self;
        let Some(tls) = tls else { return Raw(fd).write(bytes) };
        let taken = tls.writer().write(bytes)?;
        // The next reading writes the rest.
        write_out(tls, fd)?;
        Ok(taken)
    }

    /// Reads the bytes that are there. Fewer than fit mean that no more are there, or that the
    /// connection has ended. 0: the server has closed.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; the errors of the connection.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Socket { fd, tls } = self;
        let Some(tls) = tls else { return Raw(fd).read(buffer) };
        let mut filled = 0;
        write_out(tls, fd)?;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match tls.reader().read(rest) {
                Ok(0) => break,
                Ok(read) => {
                    filled += read;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The server has closed without a goodbye of TLS. HTTP tells whether an answer is whole.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            match tls.read_tls(&mut Raw(fd)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && filled > 0 => break,
                Err(error) => return Err(error),
            }
            let understood = tls.process_new_packets();
            write_out(tls, fd)?;
            understood.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        }
        Ok(filled)
    }
}

/// Writes as many of the bytes that TLS has for the server as there is room for.
fn write_out(tls: &mut ClientConnection, fd: &OwnedFd) -> io::Result<()> {
    while tls.wants_write() {
        match tls.write_tls(&mut Raw(fd)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
